"""One rank samples, all are told, one answers: in threads."""

from typing import Any

import numpy as np
import pytest
import torch

from services.worker.logprobs import measure
from services.worker.parallel.shared_tokens import SharedTokens
from services.worker.parallel.topology import Topology
from services.worker.plan import LogprobColumns
from services.worker.sampler import Sampled, sample
from services.worker.sampling_rows import SamplingRows
from tests.services.worker.parallel.thread_groups import make_groups, run_together
from tests.services.worker.plans import make_sequence

ROWS = np.array([0, 1, 2])
COUNTS = np.array([3, 1, 9])


def make_settings() -> SamplingRows:
    settings = SamplingRows(4, 50)
    for row, temperature in enumerate((0.0, 1.0, 0.7)):
        settings.admit(make_sequence(row, [1], temperature=temperature, seed=row))
    return settings


def make_logits() -> torch.Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(2))


def sample_everywhere(layout: str, logits: torch.Tensor, num_logprobs: np.ndarray) -> list[Sampled]:
    topology = Topology.parse(layout)
    groups = make_groups("replica", topology.replica_size)
    source = topology.replica_size - topology.tensor_parallel_size

    def work(rank: int) -> Sampled:
        own = logits if rank == source else None
        tokens = SharedTokens(groups[rank], topology)
        return tokens.sample(own, make_settings(), ROWS, COUNTS, num_logprobs)

    return run_together(work, topology.replica_size)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2,pp2", "pp3"])
@pytest.mark.parametrize("asked", [[-1, -1, -1], [-1, 2, 0]])
def test_all_ranks_get_the_tokens_and_the_leader_their_likelihoods(
    layout: str, asked: list[int]
) -> None:
    logits = make_logits()
    logits[2, 5] = float("nan")
    expected = sample(logits, make_settings(), ROWS, COUNTS, np.array(asked))
    found = sample_everywhere(layout, logits, np.array(asked))
    for rank, one in enumerate(found):
        assert one.tokens[:2].tolist() == expected.tokens[:2].tolist()
        assert one.is_finite.tolist() == [True, True, False]
        if rank == 0:
            check_same(one.logprobs, expected.logprobs)
        elif layout != "tp2":
            # Where the leader samples itself, the others never see logits.
            assert one.logprobs is None


def check_same(ours: LogprobColumns | None, theirs: LogprobColumns | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        for name in LogprobColumns.__slots__:
            assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_columns_are_made_where_the_logits_are(layout: str) -> None:
    topology = Topology.parse(layout)
    groups = make_groups("replica", 2)
    made_at: list[int] = []
    logits = make_logits()

    def work(rank: int) -> LogprobColumns | None:
        def make() -> LogprobColumns:
            made_at.append(rank)
            return measure(logits, torch.tensor([1, 2, 3]), np.array([0, 3, 1]))

        return SharedTokens(groups[rank], topology).measure(make)

    leader, other = run_together(work, 2)
    assert made_at == [topology.replica_size - topology.tensor_parallel_size]
    assert other is None
    check_same(leader, measure(logits, torch.tensor([1, 2, 3]), np.array([0, 3, 1])))


def test_drafts_are_those_of_the_rank_that_samples() -> None:
    groups: Any = make_groups("replica", 2)
    topology = Topology.parse("pp2")
    found = run_together(
        lambda rank: SharedTokens(groups[rank], topology).share(np.full(5, rank)).tolist(), 2
    )
    assert found == [[1] * 5, [1] * 5]
