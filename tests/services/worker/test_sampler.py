import math

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.sampler import Sampled, sample
from services.worker.sampling_rows import SamplingRows
from tests.services.worker.plans import make_sequence

VOCAB = 300
SPECS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.0, "seed": 4, "top_k": 5, "num_logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 2.0, "seed": 8, "min_p": 0.02, "logit_bias": ((5, 3.0), (6, -100.0))},
    {"temperature": 0.0, "num_logprobs": 0},
    {"temperature": 1.0, "seed": 2**64 - 1, "frequency_penalty": 1.0, "min_tokens": 4},
]


def settings_of(specs: list[dict], *, known: int = VOCAB) -> SamplingRows:
    rows = SamplingRows(len(specs), known)
    for row, spec in enumerate(specs):
        rows.admit(
            make_sequence(row, [1, 2, 3], outputs=[4, 4], max_tokens=9, stop_token_ids=(7,), **spec)
        )
    return rows


def run(logits: Tensor, specs: list[dict], rows: list[int], **known: int) -> Sampled:
    wanted = [-1 if (n := spec.get("num_logprobs")) is None else n for spec in specs]
    return sample(
        logits,
        settings_of(specs, **known),
        np.array(rows),
        np.full(len(rows), 2),
        np.array(wanted)[rows],
    )


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(len(SPECS), VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_a_row_samples_alike_alone_and_in_any_batch(logits: Tensor) -> None:
    together = run(logits, SPECS, list(range(len(SPECS))))
    order = [5, 0, 7, 2]
    mixed = run(logits[order], SPECS, order)
    assert mixed.tokens.tolist() == together.tokens[order].tolist()
    for row in range(len(SPECS)):
        assert run(logits[row : row + 1], SPECS, [row]).tokens[0] == together.tokens[row]


def test_greedy_rows_take_the_largest_logit(logits: Tensor) -> None:
    found = run(logits, [{"temperature": 0.0}] * len(SPECS), list(range(len(SPECS))))
    assert found.tokens.tolist() == logits.argmax(1).tolist()
    assert found.logprobs is None


def test_raw_logits_are_not_changed(logits: Tensor) -> None:
    before = logits.clone()
    run(logits, SPECS, list(range(len(SPECS))))
    assert torch.equal(logits, before)


def test_a_greedy_row_follows_its_penalties_and_its_bias() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4], logits[:, 9] = 2.0, 1.9
    specs = [{"presence_penalty": 0.2}, {"logit_bias": ((30, 5.0),)}]
    greedy = [{"temperature": 0.0} | spec for spec in specs]
    assert run(logits, greedy, [0, 1]).tokens.tolist() == [9, 30]


def test_another_seed_or_position_gives_other_tokens() -> None:
    flat = torch.zeros(200, VOCAB)
    specs = [{"temperature": 1.0, "seed": seed} for seed in range(200)]
    tokens = run(flat, specs, list(range(200))).tokens
    assert len(set(tokens.tolist())) > 100
    rows = settings_of([{"temperature": 1.0, "seed": 5}])
    places = np.zeros(200, np.int64)
    found = sample(flat, rows, places, np.arange(200), places - 1)
    assert len(set(found.tokens.tolist())) > 100


def test_ids_past_the_tokenizer_are_neither_sampled_nor_listed(logits: Tensor) -> None:
    logits[:, 250:] = 40.0
    specs = [spec | {"num_logprobs": 5} for spec in SPECS]
    found = run(logits, specs, list(range(len(SPECS))), known=250)
    assert found.tokens.max() < 250
    assert found.logprobs is not None
    assert found.logprobs.top_token_ids.max() < 250
    assert np.exp(found.logprobs.top_logprobs).max() <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_broken_number_marks_its_row_and_no_other(logits: Tensor, value: float) -> None:
    clean = run(logits, SPECS, list(range(len(SPECS))))
    for row in range(len(SPECS)):
        broken = logits.clone()
        broken[row, 123] = value
        found = run(broken, SPECS, list(range(len(SPECS))))
        assert found.is_finite.tolist() == [other != row for other in range(len(SPECS))]
        others = found.is_finite
        assert found.tokens[others].tolist() == clean.tokens[others].tolist()


def test_logprobs_leave_out_broken_rows(logits: Tensor) -> None:
    logits[3] = math.nan
    found = run(logits, SPECS, list(range(len(SPECS))))
    assert found.logprobs is not None
    assert found.logprobs.num_top_logprobs.tolist() == [0]


def test_min_tokens_counts_outputs_so_far() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 9.0, 8.0
    rows = settings_of([{"temperature": 0.0, "min_tokens": 4}])
    for num_outputs, token in ((2, 8), (3, 8), (4, 7)):
        found = sample(logits, rows, np.array([0]), np.array([num_outputs]), np.array([-1]))
        assert found.tokens.tolist() == [token]


def test_a_row_with_drafts_samples_at_each_as_if_the_drafts_were_its_output() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    sampling = {"temperature": 1.0, "seed": 5, "frequency_penalty": 2.0, "min_tokens": 4}
    drafts = [11, 12]

    def rows(outputs: list[int]) -> SamplingRows:
        settings = SamplingRows(1, VOCAB)
        settings.admit(make_sequence(0, [1], outputs=outputs, max_tokens=9, **sampling))
        return settings

    together = sample(
        logits,
        rows([4]),
        np.zeros(3, np.int64),
        np.array([1, 2, 3]),
        np.full(3, -1),
        lambda place: np.array(drafts[:place], np.int64),
    )
    for place in range(3):
        alone = sample(
            logits[place : place + 1],
            rows([4, *drafts[:place]]),
            np.zeros(1, np.int64),
            np.array([1 + place]),
            np.full(1, -1),
        )
        assert together.tokens[place] == alone.tokens[0]
