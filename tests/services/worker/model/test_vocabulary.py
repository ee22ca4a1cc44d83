"""Embeddings and logits of a vocabulary that ranks share, in threads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import RowShare, Stream
from services.worker.model.vocabulary import Embedding, make_embedding, whole_vocabulary
from services.worker.parallel.groups import Groups
from tests.services.worker.parallel.thread_groups import make_groups, run_together


def specs_of(spec: ModelSpec, size: int) -> list[ModelSpec]:
    groups = make_groups("tp", size)
    return [
        replace(
            spec,
            placement=Placement(tp_size=size, tp_rank=rank),
            groups=Groups(tp=groups[rank]),
        )
        for rank in range(size)
    ]


# 97 ids: neither 2 nor 4 ranks share them evenly, and the last of 49 has 1.
@pytest.mark.parametrize("size", [2, 4, 49])
def test_each_row_comes_from_the_rank_that_has_it(spec: ModelSpec, size: int) -> None:
    table = torch.randn(97, spec.config.hidden_size)
    ids = torch.cat((torch.arange(97), torch.tensor([96, 0])))
    own = specs_of(spec, size)

    def work(rank: int) -> torch.Tensor:
        embedding = make_embedding(own[rank], "model.embed_tokens")
        (slot,) = embedding.slots()
        slot.store(table if slot.window is None else table[slot.window])
        share = RowShare(num_rows=len(ids), size=size, rank=rank)
        return embedding(ids, Stream(share=share, group=own[rank].groups.tp))

    for found in run_together(work, size):
        # One number and zeros: not a bit may differ.
        assert torch.equal(found, table[ids])


def test_a_cut_stream_begins_with_each_ranks_share(spec: ModelSpec) -> None:
    table = torch.randn(97, spec.config.hidden_size)
    ids = torch.tensor([96, 0, 50, 51, 3])
    own = specs_of(spec, 4)

    def work(rank: int) -> torch.Tensor:
        embedding = make_embedding(own[rank], "model.embed_tokens")
        (slot,) = embedding.slots()
        slot.store(table if slot.window is None else table[slot.window])
        share = RowShare(num_rows=5, size=4, rank=rank)
        return embedding(ids, Stream(share=share, group=own[rank].groups.tp, is_cut=True))

    shares = run_together(work, 4)
    # Two rows each: the third rank has one and padding, the last has padding alone.
    assert [len(share) for share in shares] == [2] * 4
    assert torch.equal(torch.cat(shares)[:5], table[ids])
    assert not torch.cat(shares)[5:].any()


@pytest.mark.parametrize("size", [2, 4, 49])
def test_logits_of_all_ranks_are_put_together_without_padding(spec: ModelSpec, size: int) -> None:
    part = -(-97 // size)
    logits = torch.randn(5, part * size)
    own = specs_of(spec, size)

    def work(rank: int) -> torch.Tensor:
        return whole_vocabulary(own[rank])(logits[:, rank * part : (rank + 1) * part])

    for found in run_together(work, size):
        assert torch.equal(found, logits[:, :97])


def test_a_rank_alone_looks_up_and_hands_on(
    spec: ModelSpec, fill: Callable[..., dict[str, Any]]
) -> None:
    embedding = make_embedding(spec, "model.embed_tokens")
    assert isinstance(embedding, Embedding)
    table = fill(embedding.slots())["model.embed_tokens.weight"]
    assert torch.equal(embedding(torch.tensor([3, 96]), Stream.alone(2)), table[[3, 96]])
    logits = torch.randn(2, 97)
    assert whole_vocabulary(spec)(logits) is logits


def test_a_share_without_others_has_its_own_logits(spec: ModelSpec) -> None:
    placed = replace(spec, placement=Placement(tp_size=2, tp_rank=1))
    logits = torch.randn(2, 49)
    assert whole_vocabulary(placed)(logits) is logits
