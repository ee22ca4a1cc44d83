"""Sizes of decode steps that are captured: those of vLLM, or those asked for, within all bounds."""

import math
from collections.abc import Sequence
from typing import Protocol

from shared.errors import ConfigError

_SMALL = (1, 2, 4)
_STEP, _LARGE, _LARGE_STEP = 8, 256, 16
_LARGEST = 512
_FLAG = "--cudagraph-capture-sizes"


class StepBounds(Protocol):
    """What bounds a step."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens."""
        ...

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts of a sequence."""
        ...


def decode_sizes(
    bounds: StepBounds,
    *,
    asked: Sequence[int] | None = None,
    largest: int | None = None,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Rows of the steps to capture, ascending; none where nobody asked and steps are too small.

    Args:
        bounds: Of a step.
        asked: Sizes by the user; None for those of vLLM.
        largest: Bound of the sizes by the user.
        multiple: Every size must be one of it: ranks that share the tokens of a step.

    Raises:
        ConfigError: No size is left of those asked for.
    """
    rows = 1 + bounds.num_speculative_tokens
    bound = min(bounds.max_num_seqs * rows, bounds.max_num_batched_tokens)
    if largest is not None:
        bound = min(bound, largest)
    elif asked is None:
        bound = min(bound, _LARGEST)
    if asked is None:
        step = math.lcm(rows, multiple)
        chosen = {-(-size // step) * step for size in _default_sizes(bound)}
    else:
        chosen = {size for size in asked if size % multiple == 0}
    # Rounded up to whole sequences, then cut: a size that no step can have is none.
    whole = {-(-size // rows) * rows for size in chosen}
    is_right = {size: rows <= size <= bound and size % multiple == 0 for size in whole}
    sizes = tuple(sorted(size for size, holds in is_right.items() if holds))
    if not sizes and (asked is not None or largest is not None):
        listed = "the default" if asked is None else ", ".join(map(str, asked))
        raise ConfigError(
            f"{_FLAG}: of {listed} none is left: a size is at most {bound}, a multiple of "
            f"{multiple} and, rounded up, of {rows}"
        )
    return sizes


def _default_sizes(bound: int) -> list[int]:
    """The list of vLLM, and the bound itself: a full step is the last that should be slow."""
    small = [*_SMALL, *range(_STEP, _LARGE + 1, _STEP)]
    large = range(_LARGE + _LARGE_STEP, bound + 1, _LARGE_STEP)
    return [*small, *large, bound]
