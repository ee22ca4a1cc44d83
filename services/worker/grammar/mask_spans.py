"""One span `worker.masks` per traced request with a constraint: its masks, and what they took.

It lasts from the row's start to its last mask. Nothing is recorded per token, and nothing at all
when tracing is off.
"""

import time
from dataclasses import dataclass

from services.worker.plan import NewSequence
from shared import tracing


@dataclass(slots=True)
class _Cost:
    """What a row has cost so far."""

    new: NewSequence
    start_ns: int
    end_ns: int
    num_masks: int = 0
    mask_ns: int = 0


class MaskSpans:
    """Counts by row. One thread uses it."""

    def __init__(self) -> None:
        self._is_enabled = tracing.is_enabled()
        self._open: dict[int, _Cost] = {}

    def start(self, new: NewSequence) -> None:
        """A constrained row begins."""
        if self._is_enabled and new.traceparent:
            now = time.time_ns()
            self._open[new.row] = _Cost(new=new, start_ns=now, end_ns=now)

    def add(self, row: int, num_masks: int, duration_ns: int) -> None:
        """Masks of a row were made in a step."""
        cost = self._open.get(row)
        if cost is not None:
            cost.num_masks += num_masks
            cost.mask_ns += duration_ns
            cost.end_ns = time.time_ns()

    def end(self, row: int) -> None:
        """The row is free."""
        cost = self._open.pop(row, None)
        if cost is None:
            return
        span = tracing.start_span(
            "worker.masks",
            traceparent=cost.new.traceparent,
            attributes={
                "request_id": cost.new.request_id,
                "num_masks": cost.num_masks,
                "mask_us": cost.mask_ns // 1000,
            },
            start_ns=cost.start_ns,
        )
        span.end(cost.end_ns)

    def clear(self) -> None:
        """The epoch is over: nobody is told."""
        self._open.clear()
