"""Tokens that ranks cut: caches are complete on each, and heads are exchanged for tokens."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.model.cache_format import CacheFormat
from services.worker.model.indexer import Indexer
from services.worker.model.latent_cache import make_latent_cache
from services.worker.model.metadata import StepMetadata
from services.worker.model.norm import RMSNorm
from services.worker.model.placement import Placement
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.model.token_cut import AllTokens, TokenShare, attended_tokens, gather_rows
from services.worker.parallel.groups import Groups
from tests.services.worker.parallel.thread_groups import make_groups, run_together

CPU = torch.device("cpu")


def specs_of(spec: ModelSpec, size: int) -> list[ModelSpec]:
    return [
        replace(
            spec,
            placement=Placement(tp_size=size, tp_rank=rank, is_dsa_cp=True),
            groups=Groups(tp=group),
        )
        for rank, group in enumerate(make_groups("tp", size))
    ]


def first_metadata(count: int) -> tuple[StepMetadata, RotaryTables]:
    """A prompt of one sequence in block 2, as `first_step` has it."""
    positions = torch.arange(count)
    lens = torch.tensor([count], dtype=torch.int32)
    metadata = StepMetadata(
        num_tokens=count,
        positions=positions,
        slot_mapping=(256 + positions).to(torch.int32),
        cum_query_lens=lens,
        seq_lens=lens,
        block_table=torch.tensor([[2]], dtype=torch.int32),
    )
    tables = RotaryTables(dim=64, theta=1e4, max_positions=128, dtype=torch.float32, device=CPU)
    return metadata, tables


def make_norm(spec: ModelSpec) -> RMSNorm:
    norm = RMSNorm(512, 1e-5, spec.dtype, CPU)
    norm.weight.copy_(1 + 0.1 * torch.randn(512, generator=torch.Generator().manual_seed(1)))
    return norm


def test_a_placement_says_which_tokens_a_rank_attends_for(spec: ModelSpec) -> None:
    cache = make_latent_cache(spec, make_norm(spec))
    assert isinstance(attended_tokens(spec, cache), AllTokens)
    assert isinstance(attended_tokens(specs_of(spec, 2)[0], cache), TokenShare)


@pytest.mark.parametrize("caches", ["", "sparse_sfa_c8", "sparse_li_c8", "both"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_ranks_caches_hold_what_one_rank_writes(
    spec: ModelSpec, caches: str, size: int, first_step: Callable[[int], Any]
) -> None:
    """Of 7 tokens; 8 ranks have one each, and the last has padding."""
    names = ("sparse_sfa_c8", "sparse_li_c8") if caches == "both" else (caches,) * bool(caches)
    spec = replace(spec, cache=CacheFormat(**dict.fromkeys(names, True)))
    norm, indexer = make_norm(spec), Indexer(spec, 0, "")
    indexer.finish_loading()
    kv, keys = torch.randn(7, 576), torch.randn(7, 128)
    whole: StepInputs = first_step(7)[0]
    due = kv_cache.allocate(spec, 3).layers[0]
    AllTokens(make_latent_cache(spec, norm)).write(kv, keys, indexer.key_cache, whole, due)

    def work(rank: int) -> kv_cache.LayerCache:
        own = specs[rank]
        step = StepInputs.prepare(metadata, tables, own)
        cache = kv_cache.allocate(own, 3).layers[0]
        tokens = attended_tokens(own, make_latent_cache(own, norm))
        share = step.stream.share
        tokens.write(share.of(kv), share.of(keys), indexer.key_cache, step, cache)
        return cache

    specs = specs_of(spec, size)
    metadata, tables = first_metadata(7)
    for found in run_together(work, size):
        for name in ("latent", "rope", "indexer", "indexer_scale"):
            ours, theirs = getattr(found, name), getattr(due, name)
            assert (ours is None) == (theirs is None)
            if ours is None:
                continue
            if ours.dtype == torch.float32:
                # One operator norms and rotates there, two do here.
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_a_layer_without_indexer_writes_latents_alone(
    spec: ModelSpec, first_step: Callable[[int], Any]
) -> None:
    norm, kv = make_norm(spec), torch.randn(5, 576)
    metadata, tables = first_metadata(5)
    specs = specs_of(spec, 2)

    def work(rank: int) -> kv_cache.LayerCache:
        step = StepInputs.prepare(metadata, tables, specs[rank])
        cache = first_step(5)[1]
        tokens = attended_tokens(specs[rank], make_latent_cache(specs[rank], norm))
        tokens.write(step.stream.share.of(kv), None, None, step, cache)
        return cache

    for found in run_together(work, 2):
        assert found.latent[2, :5].any(-1).all()
        assert not found.latent[2, 5:].any()
        assert found.indexer is not None
        assert not found.indexer.any()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_own_tokens_of_all_heads_become_all_tokens_of_own_heads(spec: ModelSpec, size: int) -> None:
    values = torch.randn(3 * size, 4, 5)  # tokens, heads, width
    groups = make_groups("tp", size)

    def work(rank: int) -> torch.Tensor:
        tokens = TokenShare(make_latent_cache(spec, make_norm(spec)), groups[rank], size)
        return tokens.exchange(values[3 * rank : 3 * rank + 3])

    heads = 4 // size
    for rank, found in enumerate(run_together(work, size)):
        own = values[:, rank * heads : (rank + 1) * heads]
        assert torch.equal(found, own.flatten(1))


def test_rows_of_several_types_travel_as_one() -> None:
    types = [torch.bfloat16, torch.int8, torch.float16, torch.float32]
    wholes = [torch.randint(-9, 9, (6, width + 1)).to(types[width]) for width in range(4)]
    groups = make_groups("tp", 2)
    calls = []

    def work(rank: int) -> list[torch.Tensor]:
        group: Any = groups[rank]
        gather = group.all_gather
        group.all_gather = lambda x: calls.append(rank) or gather(x)
        return gather_rows(group, [whole[3 * rank : 3 * rank + 3] for whole in wholes], 5)

    for found in run_together(work, 2):
        for ours, theirs in zip(found, wholes, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs[:5])
    assert sorted(calls) == [0, 1]
