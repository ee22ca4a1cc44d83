"""What could be changed about a deployment, each change as another deployment.

Nothing here judges: a change is proposed where it is possible, and sized by whoever asks. Limits
of length and number are not among them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from services.worker.parallel.topology import Topology
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.moe_traffic import mc2_window_mib
from services.worker.sizing.recipe import SchemeName, describe
from shared.errors import ConfigError

_MAX_NODES: Final = 8
_HIGH_UTILIZATION: Final = 0.95
_FEW_TOKENS: Final = 2048
_MIN_HCCL_MIB: Final = 100
_LIGHTER: Final[dict[str, tuple[SchemeName, ...]]] = {
    "bf16": ("w8a8c8", "w4a8c8"),
    "w8a8": ("w4a8c8",),
    "w8a8c8": ("w4a8c8",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to do differently: what to say, and the deployment it gives."""

    text: str
    deployment: Deployment
    degree: int = 0
    """How far it goes, where a kind of change has degrees: more is not proposed if less does."""


def settings(old: Deployment) -> Iterator[Change]:
    """Settings that trade speed or safety for memory."""
    if not old.hardware.is_npu:
        return
    if old.utilization < _HIGH_UTILIZATION:
        text = f"--gpu-memory-utilization {_HIGH_UTILIZATION}"
        yield Change(text=text, deployment=replace(old, utilization=_HIGH_UTILIZATION))
    few = max(_FEW_TOKENS, old.max_num_seqs)
    if old.max_num_batched_tokens > few:
        text = f"--max-num-batched-tokens {few}"
        yield Change(text=text, deployment=replace(old, max_num_batched_tokens=few))
    buffer = max(mc2_window_mib(old), _MIN_HCCL_MIB)
    if old.topology.world_size > 1 and buffer < old.hccl_mib:
        yield Change(text=f"HCCL_BUFFSIZE={buffer}", deployment=replace(old, hccl_mib=buffer))
    if old.captured():
        yield Change(text="--enforce-eager", deployment=replace(old, is_eager=True))
    if old.has_mtp:
        text = "--num-speculative-tokens 0"
        yield Change(text=text, deployment=replace(old, num_speculative_tokens=0))
    if old.is_dsa_cp:
        yield Change(text="enable_dsa_cp off", deployment=replace(old, is_dsa_cp=False))


def caches(old: Deployment) -> Iterator[Change]:
    """Caches in eight bits."""
    for names in (("sparse_sfa_c8",), ("sparse_li_c8",), ("sparse_sfa_c8", "sparse_li_c8")):
        if any(getattr(old.cache, name) for name in names):
            continue
        cache = replace(
            old.cache,
            sparse_sfa_c8=old.cache.sparse_sfa_c8 or "sparse_sfa_c8" in names,
            sparse_li_c8=old.cache.sparse_li_c8 or "sparse_li_c8" in names,
        )
        text = " and ".join(f"enable_{name}" for name in names)
        yield Change(text=text, deployment=replace(old, cache=cache), degree=len(names))


def contexts(old: Deployment) -> Iterator[Change]:
    """Latent rows divided over the tensor-parallel ranks."""
    topology = old.topology
    size = topology.tensor_parallel_size
    if size > 1 and topology.decode_context_parallel_size == 1:
        changed = replace(topology, decode_context_parallel_size=size)
        yield Change(
            text=f"--topology {changed} (planned, not served yet)",
            deployment=replace(old, topology=changed),
        )


def layouts(old: Deployment) -> Iterator[Change]:
    """The same devices, divided otherwise."""
    topology = old.topology
    if not topology.enable_expert_parallel and topology.world_size > 1:
        changed = replace(topology, enable_expert_parallel=True)
        yield from _laid_out(old, "--enable-expert-parallel", changed)
    dp, tp = topology.data_parallel_size, topology.tensor_parallel_size
    if dp % 2 == 0 and 2 * tp <= old.hardware.devices_per_node:
        changed = _with_ranks(topology, 2 * tp)
        changed = replace(changed, data_parallel_size=dp // 2)
        yield from _laid_out(old, f"--topology {changed}", changed)


def weights(old: Deployment) -> Iterator[Change]:
    """A checkpoint of fewer bits."""
    lighter = _LIGHTER.get(old.scheme, ()) if old.hardware.is_npu else ()
    for degree, name in enumerate(lighter):
        deployment = replace(old, scheme=name, quantization=describe(old.config, name))
        text = f"{name} weights in place of {old.scheme}"
        yield Change(text=text, deployment=deployment, degree=degree)


def nodes(old: Deployment) -> Iterator[Change]:
    """More devices, up to eight nodes: more replicas over which experts are spread, or ranks."""
    topology, hardware = old.topology, old.hardware
    if not hardware.is_npu:
        return
    for factor in (2, 4, 8):
        grown = [_with_ranks(topology, factor * topology.tensor_parallel_size)]
        if topology.enable_expert_parallel:
            size = factor * topology.data_parallel_size
            grown.insert(0, replace(topology, data_parallel_size=size))
        for changed in grown:
            is_local = changed.tensor_parallel_size <= hardware.devices_per_node
            if is_local and num_nodes(changed.world_size, hardware.devices_per_node) <= _MAX_NODES:
                spread = replace(changed, enable_expert_parallel=True)
                yield from _laid_out(old, f"--topology {spread}", spread)


def num_nodes(world_size: int, devices_per_node: int) -> int:
    """Nodes that the ranks take."""
    return -(-world_size // devices_per_node)


def _with_ranks(topology: Topology, size: int) -> Topology:
    is_divided = topology.decode_context_parallel_size > 1
    return replace(
        topology,
        tensor_parallel_size=size,
        decode_context_parallel_size=size if is_divided else 1,
    )


def _laid_out(old: Deployment, text: str, topology: Topology) -> Iterator[Change]:
    """A change of layout, with its nodes where they differ; none where the model cannot be cut."""
    devices = old.hardware.devices_per_node
    before = num_nodes(old.topology.world_size, devices)
    after = num_nodes(topology.world_size, devices)
    if after != before:
        text += f" on {after} node{'s' if after > 1 else ''}"
    try:
        topology.placement(old.config, topology.coordinates(0)).check(old.config)
        deployment = replace(old, topology=topology)
    except ConfigError:
        return
    yield Change(text=text, deployment=deployment, degree=topology.world_size)
