"""The plan of a deployment: for each kind of rank what its memory goes to, and what fits.

Ranks of one pipeline stage differ only where the experts do not divide; one of each kind is
planned. The rank with the fewest blocks decides for its replica.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from services.worker.model.spec import ModelSpec
from services.worker.parallel.topology import Rank
from services.worker.sizing.activations import (
    gathered_latent_bytes,
    logits_bytes,
    stage_bytes,
    step_bytes,
    topk_bytes,
)
from services.worker.sizing.communicators import communicators
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import (
    DRIVER_BYTES,
    GRAPH_BYTES,
    RUNTIME_BYTES,
    WORKSPACE_BYTES,
)
from services.worker.sizing.kv import CacheBytes, cache_bytes
from services.worker.sizing.moe_traffic import mc2_shortage_mib, moe_rules
from services.worker.sizing.weights import WeightBytes, weigh_rank

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


class Verdict(Enum):
    """What can be said of a deployment; the values are the sentences."""

    FITS = "fits"
    STARTS = "starts, but not all sequences fit at full length"
    TOO_SMALL = "does not start: not one sequence of full length fits"
    TOO_HEAVY = "does not start: the weights leave no room for a cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One use of memory."""

    name: str
    num_bytes: int
    is_estimate: bool = False
    detail: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of things that take turns in the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """One kind of rank."""

    name: str
    count: int
    """Ranks of this kind in the deployment."""
    weights: WeightBytes
    runtime: tuple[Item, ...]
    """What is taken beside weights and blocks; empty on a CPU."""
    limit: int | None
    """Bytes that all of it may take; None on a CPU."""
    budget: int
    """Bytes left for KV blocks, or set by hand; negative if the rest is too much."""
    cache: CacheBytes

    @property
    def used(self) -> int:
        """Bytes of weights and of what runs beside them."""
        return self.weights.total + sum(item.num_bytes for item in self.runtime)

    @property
    def num_blocks(self) -> int:
        """Blocks that fit, scratch block 0 included."""
        return max(0, self.budget // self.cache.per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a deployment comes to."""

    deployment: Deployment
    ranks: tuple[RankPlan, ...]
    warnings: tuple[str, ...]
    """What stands in the way of running it, whatever fits."""

    @property
    def num_blocks(self) -> int:
        """Blocks of a replica: those of its fullest rank."""
        return min(rank.num_blocks for rank in self.ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens of a replica in all blocks but the scratch block."""
        return max(0, self.num_blocks - 1) * self.ranks[0].cache.tokens_per_block

    @property
    def blocks_per_seq(self) -> int:
        """Blocks of one sequence of full length."""
        return self.ranks[0].cache.blocks_of(self.deployment.max_model_len)

    @property
    def num_full_seqs(self) -> int:
        """Sequences of full length that a replica holds at once."""
        return max(0, self.num_blocks - 1) // self.blocks_per_seq

    @property
    def verdict(self) -> Verdict:
        """Whether it starts, and whether all that was asked fits."""
        if any(rank.budget <= 0 for rank in self.ranks):
            return Verdict.TOO_HEAVY
        if self.num_full_seqs < 1:
            return Verdict.TOO_SMALL
        is_enough = self.num_full_seqs >= self.deployment.num_full_seqs
        return Verdict.FITS if is_enough else Verdict.STARTS

    @property
    def fits(self) -> bool:
        """Whether all that was asked fits."""
        return self.verdict is Verdict.FITS


def make_plan(deployment: Deployment) -> Plan:
    """Size a deployment.

    Raises:
        ConfigError: The model cannot be laid out so.
        CheckpointError: A layer has a type that the model does not compute with.
    """
    kinds = tuple(_rank_kinds(deployment))
    return Plan(
        deployment=deployment,
        ranks=tuple(_plan_rank(deployment, *kind) for kind in kinds),
        warnings=tuple(_warnings(deployment)),
    )


def _rank_kinds(deployment: Deployment) -> Iterator[tuple[str, int, Rank]]:
    """Name, number of ranks and one rank of each kind."""
    topology, config = deployment.topology, deployment.config
    stages = topology.pipeline_parallel_size
    ep = topology.expert_parallel_size
    rest = config.n_routed_experts % ep
    per_stage = topology.world_size // stages
    for stage in range(stages):
        name = f"stage {stage}" if stages > 1 else "every rank"
        first = Rank(dp_rank=0, pp_rank=stage, tp_rank=0)
        if not rest:
            yield name, per_stage, first
            continue
        last = Rank(
            dp_rank=topology.data_parallel_size - 1,
            pp_rank=stage,
            tp_rank=topology.tensor_parallel_size - 1,
        )
        part = config.n_routed_experts // ep
        yield f"{name}, {part + 1} experts", rest, first
        yield f"{name}, {part} experts", ep - rest, last


def rank_spec(deployment: Deployment, rank: Rank) -> ModelSpec:
    """What a rank's model would be built from."""
    config = deployment.config
    placement = deployment.topology.placement(
        config, rank, is_dsa_cp=deployment.is_dsa_cp, is_flashcomm=deployment.is_flashcomm
    )
    return ModelSpec(
        config=config,
        dtype=_DTYPES[deployment.element_bytes],
        device=torch.device("meta"),
        placement=placement,
        quantization=deployment.quantization,
        cache=deployment.cache,
        has_mtp=deployment.has_mtp,
        max_model_len=deployment.max_model_len,
    )


def _plan_rank(deployment: Deployment, name: str, count: int, rank: Rank) -> RankPlan:
    topology, hardware = deployment.topology, deployment.hardware
    spec = rank_spec(deployment, rank)
    weights = weigh_rank(spec)
    cache = cache_bytes(spec, topology.decode_context_parallel_size)
    is_npu = hardware.is_npu
    runtime = tuple(_runtime(deployment, topology.rank_of(rank), cache)) if is_npu else ()
    limit = int(hardware.memory_bytes * deployment.utilization) if is_npu else None
    used = weights.total + sum(item.num_bytes for item in runtime)
    budget = deployment.kv_cache_bytes if limit is None else limit - used
    if limit is not None and deployment.kv_cache_bytes is not None:
        # Set by hand it may take what the share of memory would have spared, but no more.
        budget = min(deployment.kv_cache_bytes, hardware.memory_bytes - used)
    assert budget is not None
    return RankPlan(
        name=name,
        count=count,
        weights=weights,
        runtime=runtime,
        limit=limit,
        budget=budget,
        cache=cache,
    )


def _runtime(deployment: Deployment, rank: int, cache: CacheBytes) -> Iterator[Item]:
    tokens, rows = deployment.max_num_batched_tokens, deployment.decode_tokens
    parts = {
        f"layers, {tokens} tokens": step_bytes(deployment, tokens).peak,
        f"logits and sampling, {rows} rows": logits_bytes(deployment),
    }
    yield Item(name="largest step", num_bytes=max(parts.values()), is_estimate=True, parts=parts)
    yield Item(name="top-k indices", num_bytes=topk_bytes(deployment, tokens))
    for name, size in (
        ("gathered latent rows", gathered_latent_bytes(deployment, cache.latent_row)),
        ("next stage's input", stage_bytes(deployment, tokens)),
    ):
        if size:
            yield Item(name=name, num_bytes=size)
    yield from _graphs(deployment)
    for group in communicators(deployment, rank):
        is_window = group.names == ("mc2",)
        yield Item(
            name="MC2 window" if is_window else f"HCCL {'+'.join(group.names)}",
            num_bytes=group.num_bytes,
            detail=f"{group.size} ranks, 2 x {group.buffer_mib} MiB",
        )
    yield Item(name="kernel workspace", num_bytes=WORKSPACE_BYTES, is_estimate=True)
    yield Item(name="CANN runtime", num_bytes=RUNTIME_BYTES, is_estimate=True)
    yield Item(name="driver", num_bytes=DRIVER_BYTES, is_estimate=True)


def _graphs(deployment: Deployment) -> Iterator[Item]:
    sizes = deployment.captured()
    if not sizes:
        return
    pool = step_bytes(deployment, sizes[-1]).peak + topk_bytes(deployment, sizes[-1])
    yield Item(
        name="graph pools",
        num_bytes=pool + len(sizes) * GRAPH_BYTES,
        is_estimate=True,
        detail=f"{len(sizes)} sizes up to {sizes[-1]} tokens",
    )


def _warnings(deployment: Deployment) -> Iterator[str]:
    needed, rules = mc2_shortage_mib(deployment), moe_rules(deployment)
    if needed:
        other = rules.choose(rules.capacity + 1)
        yield (
            f"HCCL_BUFFSIZE={deployment.hccl_mib} has room for the fused exchange of "
            f"{rules.capacity} tokens between experts, of {rules.wanted_capacity}: larger steps go "
            f"by {other}; {needed} has room for all"
        )
    yield from deployment.topology.notes(deployment.config)
