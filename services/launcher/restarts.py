"""When a dead service is started again: the law alone, without clock or processes.

After a short pause, twice as long each time; at most `MAX_RESTARTS` within `WINDOW_S` seconds.
"""

from typing import Final

MAX_RESTARTS: Final = 3
WINDOW_S: Final = 60.0
FIRST_PAUSE_S: Final = 0.1


class RestartPolicy:
    """The restarts of one service."""

    def __init__(self) -> None:
        """Start with none."""
        self._restarts: list[float] = []

    def next_pause(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when it is time to give up.

        Args:
            now: Monotonic seconds at the death.
        """
        self._restarts = [moment for moment in self._restarts if now - moment < WINDOW_S]
        if len(self._restarts) >= MAX_RESTARTS:
            return None
        pause = FIRST_PAUSE_S * 2.0 ** len(self._restarts)
        self._restarts.append(now)
        return pause
