"""How the tokens of a step are shared between prompts, so that a long one does not stall others.

While anybody else wants something of the step, a long prompt gets `num_long_tokens` of it and no
more: decoding rows then see short steps, and short prompts get what is left. It gets them first, so
short prompts cannot keep it from its end either. How many prompts are under way at once, and how
many long ones among them, is bounded: one after the other they are done sooner than side by side.
"""

from services.scheduler.limits import Limits


class PromptThrottle:
    """The prompts of one step after the other."""

    __slots__ = ("_has_others", "_limits", "_num_long", "_num_partial")

    def __init__(self, limits: Limits) -> None:
        """No step yet."""
        self._limits = limits
        self._has_others = False
        self._num_partial = 0
        self._num_long = 0

    def begin(self, *, has_others: bool) -> None:
        """A step; `has_others`: more than one sequence wants something of it, anywhere."""
        self._has_others = has_others
        self._num_partial = self._num_long = 0

    def count_for(self, missing: int, budget: int) -> int:
        """Tokens that a sequence gets of a step with `budget` left."""
        most = min(missing, budget)
        if self._has_others and self._is_long(missing):
            return min(most, self._limits.num_long_tokens)
        return most

    def may_start(self, missing: int, budget: int) -> bool:
        """Whether a prompt may begin beside those that are under way."""
        if self.count_for(missing, budget) == missing:
            return True
        if self._is_long(missing) and self._num_long >= self._limits.max_long_partial_prefills:
            return False
        return self._num_partial < self._limits.max_partial_prefills

    def note(self, missing: int, count: int) -> None:
        """A sequence got `count` of its missing tokens."""
        if count < missing:
            self._num_partial += 1
            self._num_long += self._is_long(missing)

    def _is_long(self, missing: int) -> bool:
        return 0 < self._limits.num_long_tokens < missing
