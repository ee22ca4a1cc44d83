"""Shows how far loading is: a bar where somebody looks, a line now and then where nobody does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from shared.log import get_logger

_log = get_logger(__name__)

# A checkpoint of many GiB takes minutes; a small one says nothing before it is ready.
LOG_EVERY_S = 5.0
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far loading has come, in what this rank keeps."""

    num_tensors: int
    total_tensors: int
    num_bytes: int
    total_bytes: int


@contextmanager
def shown_progress(name: str, console: Console) -> Iterator[Callable[[LoadProgress], None]]:
    """What the loader reports to while the checkpoint `name` is read."""
    if not console.is_terminal:
        yield LoggedProgress(name, time.monotonic)
        return
    columns = (
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=None)

        def update(progress: LoadProgress) -> None:
            bar.update(task, completed=progress.num_bytes, total=progress.total_bytes)

        yield update


class LoggedProgress:
    """Writes log lines, at most one in `LOG_EVERY_S`."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._started_at = self._logged_at = clock()
        self._logged_bytes = 0

    def __call__(self, progress: LoadProgress) -> None:
        """Take a report."""
        now = self._clock()
        since = now - self._logged_at
        if since < LOG_EVERY_S:
            return
        # The rate is that of now, so that a stall is seen; what remains goes by the mean.
        rate = (progress.num_bytes - self._logged_bytes) / since
        mean = progress.num_bytes / (now - self._started_at)
        left = progress.total_bytes - progress.num_bytes
        _log.info(
            "loading weights",
            extra={
                "model": self._name,
                "share": f"{progress.num_bytes / max(1, progress.total_bytes):.0%}",
                "gb": round(progress.num_bytes / _GB, 1),
                "total_gb": round(progress.total_bytes / _GB, 1),
                "gb_per_s": round(rate / _GB, 2),
                "remaining_s": round(left / mean) if mean else None,
            },
        )
        self._logged_at, self._logged_bytes = now, progress.num_bytes
