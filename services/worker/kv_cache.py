"""The paged caches: what a token costs, and the tensors that hold it.

The model describes its caches as groups; the scheduler only ever sees blocks and bytes. All groups
of a layer share one block table: a block id means the same tokens in each of them.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from services.worker.model.config import BLOCK_SIZE, ModelConfig

LATENT = "latent"
ROPE = "rope"
INDEXER = "indexer"

# A cache line, as torch aligns its own memory.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """In which of the caches rows are kept in eight bits, and for which devices."""

    sparse_sfa_c8: bool = False
    """Latent and rotated key in one packed row of 656 bytes."""
    sparse_li_c8: bool = False
    """Indexer keys as int8 (or float8) with a scale."""
    generation: Literal["a2", "a3", "a5"] = "a3"
    """Atlas generation: A5 keeps float8 where the others keep int8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Caches of one kind: one row of `width` elements per token in each of `layers`."""

    name: str
    width: int
    dtype: torch.dtype
    layers: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in all layers of the group."""
        return self.width * self.dtype.itemsize * len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Caches of one layer, paged: [blocks, 128, 1, width]."""

    latent: Tensor
    rope: Tensor
    indexer: Tensor | None
    """None in a layer that shares another layer's selection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCaches:
    """Caches of all layers; block 0 is scratch and belongs to no sequence."""

    layers: tuple[LayerCache, ...]
    num_blocks: int


def describe_cache_groups(
    config: ModelConfig, dtype: torch.dtype, *, with_mtp: bool = False
) -> tuple[CacheGroup, ...]:
    """The cache groups of a model; the MTP layer's caches are included when asked for."""
    num_layers = config.num_hidden_layers + (config.num_nextn_predict_layers if with_mtp else 0)
    every = tuple(range(num_layers))
    indexed = tuple(layer for layer in every if config.has_indexer(layer))
    return (
        CacheGroup(name=LATENT, width=config.kv_lora_rank, dtype=dtype, layers=every),
        CacheGroup(name=ROPE, width=config.qk_rope_head_dim, dtype=dtype, layers=every),
        CacheGroup(name=INDEXER, width=config.index_head_dim, dtype=dtype, layers=indexed),
    )


def bytes_per_block(config: ModelConfig, dtype: torch.dtype, *, with_mtp: bool = False) -> int:
    """Bytes one block of 128 tokens takes in all layers."""
    groups = describe_cache_groups(config, dtype, with_mtp=with_mtp)
    return BLOCK_SIZE * sum(group.bytes_per_token for group in groups)


def allocate(
    config: ModelConfig,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    with_mtp: bool = False,
) -> KVCaches:
    """Allocate zeroed caches of `num_blocks` blocks, scratch block 0 included."""
    assert num_blocks > 1, "block 0 is scratch: at least two blocks are needed"
    groups = {
        group.name: group for group in describe_cache_groups(config, dtype, with_mtp=with_mtp)
    }

    def rows(name: str, layer: int) -> Tensor | None:
        group = groups[name]
        if layer not in group.layers:
            return None
        # Zeros, not empty: scratch rows are read by padding and must stay finite.
        return _zeros((num_blocks, BLOCK_SIZE, 1, group.width), dtype, torch.device(device))

    layers = []
    for layer in groups[LATENT].layers:
        latent, rope = rows(LATENT, layer), rows(ROPE, layer)
        assert latent is not None
        assert rope is not None
        layers.append(LayerCache(latent=latent, rope=rope, indexer=rows(INDEXER, layer)))
    return KVCaches(layers=tuple(layers), num_blocks=num_blocks)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU without touching the memory.

    torch.zeros writes every page: 0.4 to 1 s for the default 512 MiB, at each start. Fresh pages of
    the system are zero already and take memory only once a block is used.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
