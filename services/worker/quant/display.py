"""Shows how far quantizing is, and what came of it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from services.worker.quant.convert import ConversionProgress, Outcome, Report
from services.worker.quant.scheme import Scheme
from shared.log import get_logger

_log = get_logger(__name__)

LOG_EVERY_S: Final = 5.0
_GB: Final = 1e9
_NUM_WORST: Final = 5


@contextmanager
def shown_conversion(console: Console, num_layers: int) -> Iterator[Report]:
    """What to report to: a bar where somebody looks, a line now and then where nobody does."""
    if not console.is_terminal:
        yield LoggedConversion(num_layers, time.monotonic)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def update(progress: ConversionProgress) -> None:
            bar.update(
                task,
                description=_stage(progress, num_layers),
                completed=progress.num_bytes,
                total=progress.total_bytes,
            )

        yield update


class LoggedConversion:
    """Writes log lines, at most one in `LOG_EVERY_S`."""

    def __init__(self, num_layers: int, clock: Callable[[], float]) -> None:
        self._num_layers = num_layers
        self._clock = clock
        self._started_at = self._logged_at = clock()

    def __call__(self, progress: ConversionProgress) -> None:
        """Take a report."""
        now = self._clock()
        if now - self._logged_at < LOG_EVERY_S:
            return
        self._logged_at = now
        rate = progress.num_bytes / (now - self._started_at)
        left = progress.total_bytes - progress.num_bytes
        _log.info(
            "%s",
            _stage(progress, self._num_layers),
            extra={
                "share": f"{progress.num_bytes / max(1, progress.total_bytes):.0%}",
                "gb": round(progress.num_bytes / _GB, 1),
                "total_gb": round(progress.total_bytes / _GB, 1),
                "gb_per_s": round(rate / _GB, 3),
                "remaining_s": round(left / rate) if rate else None,
            },
        )


def _stage(progress: ConversionProgress, num_layers: int) -> str:
    work = "calibrating" if progress.is_calibrating else "quantizing"
    if progress.layer is None:
        return work
    if progress.layer == num_layers:
        return f"{work} the MTP layer"
    return f"{work} layer {progress.layer} of {num_layers}"


def show_outcome(console: Console, outcome: Outcome, seconds: float) -> None:
    """Sizes, how many matrices are stored in which way, and those that lost most."""
    table = Table("stored as", "matrices", "MB", title="Quantized checkpoint")
    for scheme in Scheme:
        if scheme in outcome.bytes_by_scheme:
            megabytes = outcome.bytes_by_scheme[scheme] / 1e6
            table.add_row(scheme, str(outcome.num_matrices[scheme]), f"{megabytes:,.1f}")
    console.print(table)
    before, after = outcome.source_bytes, outcome.target_bytes
    console.print(
        f"{before / _GB:,.3f} GB -> {after / _GB:,.3f} GB "
        f"({after / max(1, before):.0%}) in {seconds:,.1f} s"
    )
    worst = sorted(outcome.errors.items(), key=lambda item: -item[1])[:_NUM_WORST]
    losses = Table("matrix", "error", title="What rounding took away, share of the weights' size")
    for name, error in worst:
        losses.add_row(name, f"{error:.2%}")
    console.print(losses)
