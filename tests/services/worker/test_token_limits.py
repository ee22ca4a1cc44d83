import math

import numpy as np
import pytest
import torch

from services.worker.token_limits import TokenLimits
from shared.sampling import SamplingSpec, ThinkingBudget

VOCAB = 8
NO_IDS = np.empty(0, np.int64)


def possible(
    spec: SamplingSpec,
    outputs: list[int],
    ahead: list[int] | None = None,
    ends: list[int] | None = None,
) -> tuple[list[int], bool]:
    """Ids that stay possible, and whether ends must be left alone."""
    limits = TokenLimits.of(spec, np.array(outputs, np.uint32), VOCAB)
    assert limits is not None
    logits = torch.arange(VOCAB, dtype=torch.float32)
    is_held = limits.apply(logits, ahead or [], np.array(ends or [], np.int64))
    return torch.isfinite(logits).nonzero().flatten().tolist(), is_held


def without(*ids: int) -> list[int]:
    return [token for token in range(VOCAB) if token not in ids]


def test_a_request_without_limits_has_none() -> None:
    assert TokenLimits.of(SamplingSpec(), np.array([1], np.uint32), VOCAB) is None


def test_only_allowed_ids_stay_possible_and_keep_their_logits() -> None:
    limits = TokenLimits.of(SamplingSpec(allowed_token_ids=(5, 2)), np.empty(0, np.uint32), VOCAB)
    assert limits is not None
    logits = torch.arange(VOCAB, dtype=torch.float32)
    assert not limits.apply(logits, [], NO_IDS)
    assert [value for value in logits.tolist() if math.isfinite(value)] == [2.0, 5.0]


@pytest.mark.parametrize(
    ("outputs", "ahead", "banned"),
    [
        ([], [], (4,)),
        ([1, 2], [], (3, 4)),
        ([0, 1], [2], (3, 4)),
        ([2], [], (4,)),
        ([1, 2, 0], [], (4,)),
        ([1], [1, 2], (3, 4)),
    ],
)
def test_the_last_id_of_a_bad_word_cannot_follow_its_beginning(
    outputs: list[int], ahead: list[int], banned: tuple[int, ...]
) -> None:
    spec = SamplingSpec(bad_words=((4,), (1, 2, 3)))
    assert possible(spec, outputs, ahead) == (without(*banned), False)


def test_tokens_noted_later_count_as_if_they_had_been_there() -> None:
    spec = SamplingSpec(bad_words=((1, 2, 3),))
    limits = TokenLimits.of(spec, np.array([7], np.uint32), VOCAB)
    assert limits is not None
    for token in (5, 1, 2):
        limits.add(token)
    logits = torch.zeros(VOCAB)
    limits.apply(logits, [], NO_IDS)
    assert torch.isinf(logits).nonzero().flatten().tolist() == [3]


def test_bad_words_yield_when_nothing_else_is_allowed() -> None:
    spec = SamplingSpec(allowed_token_ids=(4,), bad_words=((4,),))
    assert possible(spec, []) == ([4], False)
    everything = SamplingSpec(bad_words=tuple((token,) for token in range(VOCAB)))
    assert possible(everything, []) == (list(range(VOCAB)), True)


def test_ends_are_left_alone_when_they_are_all_that_is_allowed() -> None:
    spec = SamplingSpec(allowed_token_ids=(6, 7))
    assert possible(spec, [], ends=[6, 7]) == ([6, 7], True)
    assert possible(spec, [], ends=[7]) == ([6, 7], False)


BUDGET = SamplingSpec(
    thinking_budget=ThinkingBudget(max_tokens=2, end_token_id=6, other_end_token_ids=(7,)),
    allowed_token_ids=(1,),
)


@pytest.mark.parametrize(
    ("outputs", "ahead", "left"),
    [
        ([], [], [1]),
        ([1], [], [1]),
        ([1, 1], [], [6]),
        ([1], [1], [6]),
        ([1, 1, 1], [], [6]),
        ([6, 1], [], [1]),
        ([7, 1], [], [1]),
        ([1], [6], [1]),
        ([1, 1], [6, 1], [1]),
    ],
)
def test_a_spent_budget_forces_the_end_of_the_thought_once(
    outputs: list[int], ahead: list[int], left: list[int]
) -> None:
    found, is_held = possible(BUDGET, outputs, ahead)
    assert found == left
    assert is_held == (left == [6])


def test_a_forced_end_is_possible_even_if_the_model_says_never() -> None:
    limits = TokenLimits.of(BUDGET, np.array([1, 1], np.uint32), VOCAB)
    assert limits is not None
    logits = torch.full((VOCAB,), float("-inf"))
    assert limits.apply(logits, [], NO_IDS)
    assert logits[6] == 0.0
