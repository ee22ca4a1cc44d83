"""Which sizes are chosen; `graphs/test_sizes.py` holds more of them, as a worker has them."""

import pytest

from services.worker.step_sizes import decode_sizes
from shared.errors import ConfigError
from tests.services.worker.plans import make_capacity


def sizes(num_seqs: int, drafts: int = 0, **asked: object) -> tuple[int, ...]:
    bounds = make_capacity(
        max_num_seqs=num_seqs, num_speculative_tokens=drafts, max_num_batched_tokens=8192
    )
    return decode_sizes(bounds, **asked)  # type: ignore[arg-type]  # as a case has them


def test_ranks_that_cut_tokens_get_sizes_that_they_share_evenly() -> None:
    # A full step of 12 rows cannot be shared by 8 ranks, and none larger can be.
    assert sizes(12, multiple=8) == (8,)
    assert sizes(12, 3, multiple=8) == (8, 16, 24, 32, 40, 48)
    assert sizes(12, 2, multiple=4) == (12, 24, 36)


def test_steps_too_small_for_any_size_have_none_unless_one_was_asked_for() -> None:
    assert sizes(1, multiple=2) == ()
    with pytest.raises(ConfigError, match="--cudagraph-capture-sizes: of 1 none is left"):
        sizes(1, multiple=2, asked=[1])
