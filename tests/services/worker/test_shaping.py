import math
from collections import Counter

import numpy as np
import pytest
import torch

from services.worker.shaping import RowShape, shape_logits
from tests.services.worker.plans import make_sequence

VOCAB = 12


def shape(
    logits: torch.Tensor, prompt: list[int], outputs: list[int], **sampling: object
) -> torch.Tensor:
    new = make_sequence(0, prompt, outputs=outputs, **sampling)
    row = RowShape.of(new, VOCAB)
    assert row is not None
    changed = logits.clone()[None]
    shape_logits(changed, [(0, row)], np.array([len(outputs)]))
    return changed[0]


def penalised(
    logits: list[float], prompt: list[int], outputs: list[int], **sampling: float
) -> list[float]:
    """The formula, token by token."""
    counts = Counter(outputs)
    result = []
    for token, logit in enumerate(logits):
        factor = sampling.get("repetition_penalty", 1.0)
        value = logit
        if token in counts or token in prompt:
            value = value / factor if value > 0 else value * factor
        value -= sampling.get("frequency_penalty", 0.0) * counts[token]
        value -= sampling.get("presence_penalty", 0.0) * (counts[token] > 0)
        result.append(value)
    return result


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.4},
    ],
)
def test_penalties_equal_the_formula(sampling: dict) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    prompt, outputs = [0, 1, 2, 2], [2, 3, 3, 3, 4]
    expected = penalised(logits.tolist(), prompt, outputs, **sampling)
    found = shape(logits, prompt, outputs, **sampling)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_prompt_tokens_count_for_repetition_only() -> None:
    logits = torch.ones(VOCAB)
    found = shape(logits, [5], [], frequency_penalty=1, presence_penalty=1)
    assert found.tolist() == logits.tolist()
    assert shape(logits, [5], [], repetition_penalty=2.0)[5] == 0.5


def test_tokens_noted_later_count_as_if_they_had_been_there() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    sampling = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    resumed = shape(logits, [0, 1], [3, 3, 4, 1], **sampling)
    row = RowShape.of(make_sequence(0, [0, 1], outputs=[3], **sampling), VOCAB)
    assert row is not None
    for token in (3, 4, 1):
        row.add(token)
    grown = logits.clone()[None]
    shape_logits(grown, [(0, row)], np.array([4]))
    assert torch.equal(grown[0], resumed)


def test_min_tokens_makes_ending_ids_impossible_until_it_is_reached() -> None:
    sampling = {"min_tokens": 2, "eos_token_ids": (3,), "stop_token_ids": (4,), "max_tokens": 9}
    logits = torch.zeros(VOCAB)
    found = shape(logits, [0], [1], **sampling)
    assert [i for i, v in enumerate(found.tolist()) if v == -math.inf] == [3, 4]
    row = RowShape.of(make_sequence(0, [0], **sampling), VOCAB)
    assert row is not None
    changed = logits.clone()[None]
    shape_logits(changed, [(0, row)], np.array([2]))
    assert torch.isfinite(changed).all()


def test_an_ignored_eos_is_not_masked() -> None:
    found = shape(
        torch.zeros(VOCAB), [0], [], min_tokens=2, eos_token_ids=(3,), stop_token_ids=(4,),
        ignore_eos=True,
    )  # fmt: skip
    assert found[3] == 0
    assert found[4] == -math.inf


def test_min_tokens_yields_when_every_id_would_end_the_sequence() -> None:
    new = make_sequence(0, [0], min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    assert RowShape.of(new, VOCAB) is None


def test_stop_ids_past_the_vocabulary_are_no_concern() -> None:
    found = shape(torch.zeros(VOCAB), [0], [], min_tokens=5, stop_token_ids=(3, VOCAB, 10**6))
    assert [i for i, v in enumerate(found.tolist()) if v == -math.inf] == [3]


def test_bias_is_added_before_penalties() -> None:
    found = shape(
        torch.zeros(VOCAB), [5], [], logit_bias=((5, 4.0), (6, -100.0)), repetition_penalty=2.0
    )
    assert found[5] == 2.0
    assert found[6] == -100.0


def test_a_sequence_that_changes_nothing_has_no_shape() -> None:
    assert RowShape.of(make_sequence(0, [0], temperature=0.7, stop_token_ids=(1,)), VOCAB) is None


def test_rows_are_shaped_independently() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    specs = [{"presence_penalty": 1.0}, {"logit_bias": ((2, 5.0),)}, {"min_tokens": 3}]
    news = [
        make_sequence(i, [1], outputs=[2], stop_token_ids=(0,), **spec)
        for i, spec in enumerate(specs)
    ]
    rows = [RowShape.of(new, VOCAB) for new in news]
    together = logits.clone()
    shape_logits(together, list(enumerate(rows)), np.array([1, 1, 1]))
    for index, row in enumerate(rows):
        alone = logits[index : index + 1].clone()
        shape_logits(alone, [(0, row)], np.array([1]))
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_drafts_taken_for_granted_count_like_outputs(num_drafts: int) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    sampling = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 4}
    sampling |= {"stop_token_ids": (1,), "logit_bias": ((2, 1.0),)}
    outputs, drafts = [3, 4], [4, 9, 3][:num_drafts]
    row = RowShape.of(make_sequence(0, [0, 2], outputs=outputs, **sampling), VOCAB)
    assert row is not None
    found = logits.clone()[None]
    shape_logits(found, [(0, row)], np.array([2 + num_drafts]), [np.array(drafts, np.int64)])
    expected = shape(logits, [0, 2], outputs + drafts, **sampling)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)


def test_min_tokens_yield_to_limits_that_leave_only_ends() -> None:
    found = shape(
        torch.zeros(VOCAB), [1], [], min_tokens=2, eos_token_ids=(3, 4), allowed_token_ids=(3,)
    )
    assert torch.isfinite(found).nonzero().flatten().tolist() == [3]


def test_a_bias_and_penalties_do_not_bring_back_what_is_not_allowed() -> None:
    found = shape(
        torch.zeros(VOCAB),
        [1],
        [5],
        allowed_token_ids=(3,),
        logit_bias=((5, 100.0),),
        repetition_penalty=0.5,
        presence_penalty=-2.0,
    )
    assert torch.isfinite(found).nonzero().flatten().tolist() == [3]


def test_drafts_count_as_output_for_the_limits() -> None:
    row = RowShape.of(make_sequence(0, [1], bad_words=((2, 3, 4),), outputs=[2]), VOCAB)
    assert row is not None
    logits = torch.zeros(1, VOCAB)
    shape_logits(logits, [(0, row)], np.array([2]), [np.array([3])])
    assert torch.isinf(logits[0]).nonzero().flatten().tolist() == [4]
