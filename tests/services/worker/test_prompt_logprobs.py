import math

import numpy as np
import pytest
import torch

from services.worker.batch import Batch, BatchBuilder
from services.worker.contract import begin_step
from services.worker.plan import NewSequence
from services.worker.prompt_logprobs import TILE_ROWS, PromptLogprobs
from services.worker.rows import RowTable
from services.worker.tokens import OwnTokens
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence

CPU = torch.device("cpu")
WIDTH, VOCAB, KNOWN = 6, 30, 29
PROMPT = [20, 21, 22, 23, 24, 25, 26]


class Head:
    """Logits of every call in the same memory, as a device's head may do it."""

    def __init__(self) -> None:
        self.weight = torch.randn(WIDTH, VOCAB, generator=torch.Generator().manual_seed(1))
        self.memory = torch.empty(1024, VOCAB)
        self.most = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(hidden))
        return torch.matmul(hidden, self.weight, out=self.memory[: len(hidden)])


class Step:
    """One step over rows of a table."""

    def __init__(self, sequences: list[NewSequence], entries: dict[int, Entry]) -> None:
        capacity = make_capacity(max_model_len=400, max_num_batched_tokens=400, num_blocks=200)
        self.table = RowTable(capacity)
        self.prompts = PromptLogprobs(self.table, OwnTokens(), KNOWN)
        for new in sequences:
            self.table.admit(new)
            self.prompts.admit(new)
        active = begin_step(make_plan(1, entries), self.table, 1, lambda new: None)
        self.batch: Batch = BatchBuilder(self.table, CPU, row_multiple=1).build(active)
        count = len(self.batch.token_ids)
        self.hidden = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))
        self.head = Head()

    def measure(self) -> list[tuple[int, int, list[float]]]:
        found = self.prompts.measure(self.batch, self.hidden, self.head)
        return [(one.row, one.start, one.logprobs.sampled_logprobs.tolist()) for one in found]

    def expected(self, place: int, token: int) -> float:
        """The formula, for the token behind a place of the step."""
        logits = (self.hidden[place] @ self.head.weight)[:KNOWN].double()
        return float(logits[token] - torch.logsumexp(logits, 0))


def blocks(count: int) -> tuple[int, ...]:
    return tuple(range(1, 1 + count))


def test_each_prompt_token_but_the_first_is_measured_by_the_state_before_it() -> None:
    step = Step(
        [make_sequence(1, PROMPT, num_prompt_logprobs=0)],
        {1: Entry(scheduled=7, blocks=blocks(2))},
    )
    ((row, start, values),) = step.measure()
    assert (row, start) == (1, 1)
    assert values == pytest.approx([step.expected(i, PROMPT[i + 1]) for i in range(6)], abs=1e-5)


def test_chunks_join_and_only_who_asked_is_measured() -> None:
    sequences = [
        make_sequence(0, PROMPT),
        make_sequence(1, PROMPT, num_prompt_logprobs=2),
        make_sequence(2, [5, 6], outputs=[7], num_prompt_logprobs=0),
        make_sequence(3, PROMPT, num_prompt_logprobs=1),
    ]
    step = Step(
        sequences,
        {
            0: Entry(scheduled=7, blocks=(1, 2)),
            1: Entry(scheduled=4, blocks=(3,)),
            2: Entry(scheduled=3, blocks=(4,)),
            3: Entry(scheduled=7, blocks=(5, 6)),
        },
    )
    found = step.measure()
    # The last token of a chunk tells of the first one of the next; an output is no prompt.
    assert [(row, start, len(values)) for row, start, values in found] == [
        (1, 1, 4), (2, 1, 1), (3, 1, 6),
    ]  # fmt: skip
    assert found[0][2][3] == pytest.approx(step.expected(7 + 3, PROMPT[4]), abs=1e-5)
    assert found[1][2][0] == pytest.approx(step.expected(11, 6), abs=1e-5)


def test_alternatives_are_the_likeliest_with_ranks_of_the_token() -> None:
    step = Step(
        [make_sequence(1, PROMPT, num_prompt_logprobs=3)],
        {1: Entry(scheduled=7, blocks=blocks(2))},
    )
    (found,) = step.prompts.measure(step.batch, step.hidden, step.head)
    columns = found.logprobs
    assert columns.num_top_logprobs.tolist() == [3] * 6
    logits = (step.hidden[:6] @ step.head.weight)[:, :KNOWN]
    best = torch.topk(logits, 3).indices
    assert columns.top_token_ids.reshape(6, 3).tolist() == best.tolist()
    targets = torch.tensor(PROMPT[1:])[:, None]
    ranks = 1 + (logits > logits.gather(1, targets)).sum(dim=1)
    assert columns.sampled_ranks.tolist() == ranks.tolist()


def test_a_long_chunk_is_measured_in_tiles() -> None:
    prompt = [i % KNOWN for i in range(150)]
    step = Step(
        [make_sequence(1, prompt, num_prompt_logprobs=0)],
        {1: Entry(scheduled=150, blocks=blocks(38))},
    )
    ((_, _, values),) = step.measure()
    assert step.head.most == TILE_ROWS
    expected = [step.expected(i, prompt[i + 1]) for i in range(149)]
    assert values == pytest.approx(expected, abs=1e-5)
    assert all(math.isfinite(value) for value in values)


def test_a_row_that_was_freed_or_given_to_another_is_measured_no_more() -> None:
    step = Step(
        [make_sequence(1, PROMPT, num_prompt_logprobs=0)],
        {1: Entry(scheduled=7, blocks=blocks(2))},
    )
    step.prompts.free(1)
    assert step.measure() == []
    step.prompts.admit(make_sequence(1, PROMPT, num_prompt_logprobs=0))
    step.prompts.admit(make_sequence(1, PROMPT))
    assert step.measure() == []


def test_a_rank_without_the_head_answers_what_it_is_told() -> None:
    class Told(OwnTokens):
        def measure(self, make):  # noqa: ANN001, ANN202  # as the parent's
            return columns

    step = Step(
        [make_sequence(1, PROMPT, num_prompt_logprobs=0)],
        {1: Entry(scheduled=7, blocks=blocks(2))},
    )
    (found,) = step.prompts.measure(step.batch, step.hidden, step.head)
    columns = found.logprobs
    step.prompts._tokens = Told()
    (told,) = step.prompts.measure(step.batch, step.hidden, None)
    assert np.array_equal(told.logprobs.sampled_logprobs, columns.sampled_logprobs)
