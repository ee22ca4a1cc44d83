"""Shows how far loading is: a bar where somebody looks, a line now and then where nobody does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from services.worker.weights import LoadProgress
from shared.log import get_logger

_log = get_logger(__name__)

# A checkpoint of many GiB takes minutes; a small one says nothing before it is ready.
LOG_EVERY_S = 5.0


@contextmanager
def shown_progress(name: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """What the loader reports to while the checkpoint `name` is read."""
    if not console.is_terminal:
        yield LoggedProgress(name, time.monotonic)
        return
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(name, total=None)

        def update(progress: LoadProgress) -> None:
            bar.update(task, completed=progress.num_bytes, total=progress.total_bytes)

        yield update


class LoggedProgress:
    """Writes log lines, at most one in `LOG_EVERY_S`."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._logged_at = clock()

    def __call__(self, progress: LoadProgress) -> None:
        """Take a report."""
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = now
        share = progress.num_bytes / max(1, progress.total_bytes)
        _log.info("loading weights", extra={"model": self._name, "share": f"{share:.0%}"})
