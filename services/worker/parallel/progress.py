"""What this rank is doing, for others to read when nothing moves any more.

The runner's thread writes a few plain fields, another thread reads them without a lock: a reading
may be a moment old, which is all that is promised.
"""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank was when it was asked."""

    step: int = 0
    """The step it is in, or was in last; 0 before the first."""
    seconds: float = 0.0
    """Time in that step; 0 when it waits for the next one."""
    num_meetings: int = 0
    """Exchanges with other ranks that it has entered in this step."""
    meeting: str = ""
    """The exchange it waits in; empty while it computes."""

    def __str__(self) -> str:
        if not self.seconds:
            return f"idle after step {self.step}"
        place = f"waiting in {self.meeting}" if self.meeting else "computing"
        return (
            f"in step {self.step} for {self.seconds:.1f} s, {place} "
            f"(exchange {self.num_meetings} of the step)"
        )


class Progress:
    """Written by the runner's thread alone."""

    def __init__(self) -> None:
        self._step = 0
        self._began_at: float | None = None
        self._num_meetings = 0
        self._meeting = ""

    def begin(self, step: int) -> None:
        """A step starts."""
        self._step = step
        self._num_meetings = 0
        self._began_at = time.monotonic()

    def end(self) -> None:
        """The step is over."""
        self._began_at = None

    def enter(self, meeting: str) -> None:
        """The rank meets others and may wait for them."""
        self._num_meetings += 1
        self._meeting = meeting

    def leave(self) -> None:
        """It goes on."""
        self._meeting = ""

    def position(self) -> Position:
        """Where the rank is now."""
        began_at = self._began_at
        return Position(
            step=self._step,
            # Never 0 inside a step, however new it is.
            seconds=0.0 if began_at is None else max(1e-3, time.monotonic() - began_at),
            num_meetings=self._num_meetings,
            meeting=self._meeting,
        )
