"""When a dead service is started again: the law alone, without clock or processes.

After a short pause, twice as long each time; at most `MAX_RESTARTS` within `WINDOW_S` seconds.
Beyond that it is tried on as long as a ready one of its kind serves in its place, after longer and
longer pauses of `MAX_PAUSE_S` at most, until it has stayed for `WINDOW_S`; without one it is over.
"""

from typing import Final

MAX_RESTARTS: Final = 3
WINDOW_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1
# From the failure that would have been one too many.
FIRST_LONG_PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 30.0
# After an end that was asked for, which is no failure.
CLEAN_PAUSE_S: Final = 0.5


class RestartPolicy:
    """The restarts of one service."""

    def __init__(self) -> None:
        """Start with none."""
        self._restarts: list[float] = []
        self._last_start = float("-inf")
        self._num_long = 0

    @property
    def num_failures(self) -> int:
        """How often in a row it failed, once that is more than what is waited for shortly."""
        return MAX_RESTARTS + self._num_long if self._num_long else 0

    def next_pause(self, now: float, *, has_sibling: bool = False) -> float | None:
        """Seconds to wait before the next start; None when it is time to give up.

        Args:
            now: Monotonic seconds at the failure.
            has_sibling: Whether a ready one of its kind serves.
        """
        if now - self._last_start >= WINDOW_S:
            self._num_long = 0
        self._restarts = [moment for moment in self._restarts if now - moment < WINDOW_S]
        is_often = len(self._restarts) >= MAX_RESTARTS
        if has_sibling and (is_often or self._num_long):
            pause = min(MAX_PAUSE_S, FIRST_LONG_PAUSE_S * 2.0**self._num_long)
            self._num_long += 1
        elif is_often:
            return None
        else:
            pause = FIRST_PAUSE_S * 2.0 ** len(self._restarts)
        self._restarts.append(now)
        self._last_start = now + pause
        return pause
