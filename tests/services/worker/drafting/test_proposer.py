"""What the proposer asks of the MTP layer, with a layer that notes it and counts upwards."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.batch import BatchBuilder
from services.worker.contract import begin_step
from services.worker.drafting.proposer import Proposer
from services.worker.model.metadata import StepMetadata
from services.worker.rows import ENDED, RowTable
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence

CPU = torch.device("cpu")
VOCAB = 100


class Counting:
    """The draft behind token t is t + 1; its state at a position is t + 0.5."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[float], list[int]]] = []

    def draft(self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: None) -> Tensor:
        self.calls.append((token_ids.tolist(), hidden[:, 0].tolist(), step.positions.tolist()))
        return token_ids[:, None] + 0.5

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        return torch.eye(VOCAB + 2)[hidden[:, 0].long() + 1]


class Bench:
    def __init__(self, *, multiple: int = 1, num_known_ids: int = VOCAB, **capacity: int) -> None:
        limits = make_capacity(
            **({"num_speculative_tokens": 3, "max_num_batched_tokens": 64} | capacity)
        )
        self.table = RowTable(limits)
        self.drafter = Counting()
        self.builder = BatchBuilder(self.table, CPU, row_multiple=multiple)
        self.proposer = Proposer(
            self.drafter,
            None,
            self.table,
            num_known_ids=num_known_ids,
            device=CPU,
            row_multiple=multiple,
        )

    def propose(self, sampled: dict[int, list[int]], **entries: Entry) -> None:
        """One step; `sampled` has the runs of the rows that sample."""
        table, rows = self.table, {int(name[1:]): entry for name, entry in entries.items()}
        active = begin_step(make_plan(1, rows), table, 1, lambda new: None)
        batch = self.builder.build(active)
        accepted = np.zeros(len(active.rows), np.int64)
        for place, row in enumerate(active.rows.tolist()):
            run = sampled.get(row, [])
            accepted[place] = max(0, len(run) - 1)
            size = table.num_tokens[row]
            table.tokens[row, size : size + len(run)] = run
            table.num_tokens[row] += len(run)
        hidden = 1000.0 + torch.arange(batch.metadata.num_tokens)[:, None]
        self.proposer.propose(hidden, batch, active, accepted)

    def drafts(self, row: int) -> list[int]:
        size = int(self.table.num_tokens[row])
        return self.table.tokens[row, size : size + int(self.table.num_drafts[row])].tolist()


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.table.admit(make_sequence(0, [10, 11, 12], max_tokens=30))
    bench.table.admit(make_sequence(1, [20, 21, 22, 23], max_tokens=30))
    return bench


def test_ids_are_shifted_and_the_new_token_stands_last(bench: Bench) -> None:
    bench.propose({0: [40]}, _0=Entry(scheduled=3, blocks=(1, 2)))
    ids, hidden, positions = bench.drafter.calls[0]
    assert (ids, positions) == ([11, 12, 40], [0, 1, 2])
    assert hidden == [1000.0, 1001.0, 1002.0]
    assert bench.drafts(0) == [41, 42, 43]


def test_a_chunk_in_the_middle_takes_the_true_next_token_and_drafts_nothing(bench: Bench) -> None:
    bench.propose({}, _1=Entry(scheduled=2, blocks=(1,)))
    assert [call[0] for call in bench.drafter.calls] == [[21, 22]]
    assert bench.drafts(1) == []


def test_later_passes_are_fed_with_what_the_one_before_gave(bench: Bench) -> None:
    bench.propose(
        {0: [40]}, _0=Entry(scheduled=3, blocks=(1, 2)), _1=Entry(scheduled=2, blocks=(3,))
    )
    assert bench.drafter.calls[1:] == [([41], [40.5], [3]), ([42], [41.5], [4])]


def test_the_last_kept_draft_is_where_drafting_goes_on(bench: Bench) -> None:
    bench.propose({0: [40]}, _0=Entry(scheduled=3, blocks=(1, 2, 3)))
    bench.table.num_computed[0] = 3
    # Three drafts verified, one kept: tokens at 3 and 4, a new one at 5.
    bench.propose({0: [41, 60]}, _0=Entry(scheduled=4, computed=3))
    ids, _, positions = bench.drafter.calls[3]
    assert positions == [3, 4, 5, 6]
    assert ids[:2] == [41, 60]
    assert bench.drafter.calls[4] == ([61], [60.5], [5])
    assert bench.drafts(0) == [61, 62, 63]


def test_rows_near_their_end_get_as_many_as_can_count(bench: Bench) -> None:
    for row, max_tokens in ((2, 3), (3, 2), (4, 1)):
        bench.table.admit(make_sequence(row, [30], max_tokens=max_tokens))
    entries = {f"_{row}": Entry(blocks=(row + 1, row + 10)) for row in (2, 3, 4)}
    bench.propose({2: [50], 3: [60], 4: [70]}, **entries, _0=Entry(scheduled=3, blocks=(1, 2)))
    assert [bench.drafts(row) for row in (2, 3, 4)] == [[51], [], []]


def test_rows_are_served_in_the_order_of_their_number_of_drafts(bench: Bench) -> None:
    bench.table.admit(make_sequence(2, [30], max_tokens=3))
    bench.table.admit(make_sequence(3, [30], max_tokens=4))
    entries = {f"_{row}": Entry(blocks=(row + 1, row + 10)) for row in (2, 3)}
    bench.propose({2: [50], 3: [60], 0: [70]}, **entries, _0=Entry(scheduled=3, blocks=(1, 2)))
    assert [bench.drafts(row) for row in (2, 3, 0)] == [[51], [61, 62], [71, 72, 73]]
    assert [len(call[0]) for call in bench.drafter.calls] == [5, 2, 1]


def test_drafts_reach_as_far_as_the_blocks(bench: Bench) -> None:
    bench.propose({1: [40]}, _1=Entry(scheduled=4, blocks=(1,)))
    # Four positions are held: the first pass fills them, so one draft is all.
    assert bench.drafts(1) == [41]
    assert len(bench.drafter.calls) == 1


def test_a_row_that_ended_gets_no_drafts(bench: Bench) -> None:
    original = bench.proposer.propose

    def end_first(*arguments: object) -> None:
        bench.table.state[0] = ENDED
        original(*arguments)

    bench.proposer.propose = end_first
    bench.propose({0: [40]}, _0=Entry(scheduled=3, blocks=(1, 2)))
    assert bench.drafts(0) == []
    assert len(bench.drafter.calls) == 1


def test_ids_past_the_tokenizer_are_not_drafted() -> None:
    bench = Bench(num_known_ids=41)
    bench.table.admit(make_sequence(0, [10, 11, 12], max_tokens=30))
    bench.propose({0: [40]}, _0=Entry(scheduled=3, blocks=(1, 2)))
    # The likeliest of all, 41, is unknown; of the equal rest the lowest id is taken.
    assert bench.drafts(0) == [0, 1, 2]


def test_padded_steps_give_the_same_drafts() -> None:
    found = []
    for multiple in (1, 4):
        bench = Bench(multiple=multiple)
        bench.table.admit(make_sequence(0, [10, 11, 12], max_tokens=30))
        bench.table.admit(make_sequence(1, [20, 21], max_tokens=30))
        entries = {"_0": Entry(scheduled=3, blocks=(1, 2)), "_1": Entry(scheduled=2, blocks=(3, 4))}
        bench.propose({0: [40], 1: [50]}, **entries)
        found.append([bench.drafts(0), bench.drafts(1)])
        assert all(len(call[0]) % multiple == 0 for call in bench.drafter.calls)
    assert found[0] == found[1] == [[41, 42, 43], [51, 52, 53]]
