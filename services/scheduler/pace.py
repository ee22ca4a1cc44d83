"""How fast work gets done, measured: for what a client that has to wait is told.

Time comes as an argument. The clock of a replica follows its steps; the pace of the queue follows
who leaves it.
"""

from typing import Final

# What was measured so many prompt tokens, or seconds, ago counts half.
_HALF_TOKENS: Final = 65_536.0
_HALF_S: Final = 10.0
# A window in which to count those that leave the queue.
_WINDOW_S: Final = 1.0


class StepClock:
    """Steps of one replica: how long they take, how long the device waits between them.

    The device waits when it has done a step, knows of no other, and there is work: what a plan sent
    ahead saves.
    """

    __slots__ = (
        "_has_work",
        "_last_at",
        "_prompt_s",
        "_prompt_tokens",
        "busy_s",
        "idle_s",
        "num_started",
    )

    def __init__(self) -> None:
        """Nothing measured."""
        self.busy_s = 0.0
        self.idle_s = 0.0
        # Sequences that took a row.
        self.num_started = 0
        self._last_at = 0.0
        self._has_work = False
        self._prompt_s = 0.0
        self._prompt_tokens = 0.0

    def finished(
        self, planned_at: float, now: float, num_prompt_tokens: int, wait_s: float
    ) -> None:
        """A result came.

        Args:
            planned_at: When its plan was made.
            now: Seconds.
            num_prompt_tokens: Prompt tokens that the step computed.
            wait_s: For how long the worker had waited for the plan.
        """
        began_at = max(planned_at, self._last_at)
        self.busy_s += now - began_at
        if self._has_work:
            self.idle_s += max(wait_s, began_at - self._last_at)
        self._last_at = now
        if num_prompt_tokens:
            fade = 0.5 ** (num_prompt_tokens / _HALF_TOKENS)
            self._prompt_s = self._prompt_s * fade + now - began_at
            self._prompt_tokens = self._prompt_tokens * fade + num_prompt_tokens

    def left(self, *, has_work: bool) -> None:
        """The result was read; whether there is something to do at once."""
        self._has_work = has_work

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second of the steps that had any; 0 before the first."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0


class QueuePace:
    """How many sequences leave the queue for a replica per second, while some wait."""

    __slots__ = ("_at", "_num_taken", "_rate")

    def __init__(self) -> None:
        """Nothing measured."""
        self._at: float | None = None
        self._num_taken = 0
        self._rate: float | None = None

    def look(self, now: float, num_taken: int, *, is_waiting: bool) -> None:
        """Compare a growing count with that of the last look; called a few times per second."""
        if not is_waiting:
            self._at = None
            return
        if self._at is None:
            self._at, self._num_taken = now, num_taken
        elif now - self._at >= _WINDOW_S:
            seconds = now - self._at
            rate = (num_taken - self._num_taken) / seconds
            fade = 0.5 ** (seconds / _HALF_S)
            self._rate = rate if self._rate is None else self._rate * fade + rate * (1 - fade)
            self._at, self._num_taken = now, num_taken

    @property
    def per_s(self) -> float | None:
        """Sequences per second; None when nothing was measured."""
        return self._rate
