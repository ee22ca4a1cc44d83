"""The paged caches: what a token costs, and the tensors that hold it.

The model describes its caches as groups; the scheduler only ever sees blocks and bytes. All groups
of a layer share one block table: a block id means the same tokens in each of them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.model.config import BLOCK_SIZE
from services.worker.model.spec import ModelSpec
from services.worker.ops.pages import prefer_huge_pages
from shared.errors import ConfigError

LATENT = "latent"
ROPE = "rope"
PACKED = "packed latent"
KEY = "indexer key"
KEY_C8 = "8-bit indexer key"
KEY_SCALE = "indexer key scale"

SCALE_TILE = 128
"""Latents of a packed row under one scale."""
_SCALE_BYTES = 4
_ROPE_BYTES = 2

# A cache line, as torch aligns its own memory.
_ALIGNMENT = 64


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

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache."""
        return (num_blocks, BLOCK_SIZE, 1, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """Caches of one layer, paged: [blocks, 128, 1, width]."""

    latent: Tensor
    """C wide; packed rows of 656 bytes, which hold the rotated key too, under SFA C8."""
    rope: Tensor | None
    """None where the latent rows are packed."""
    indexer: Tensor | None
    """None in a layer that shares another layer's selection."""
    indexer_scale: Tensor | None = None
    """[blocks, 128, 1, 1], beside 8-bit keys only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCaches:
    """Caches of a stage's layers, those of an MTP layer last; block 0 is scratch."""

    layers: tuple[LayerCache, ...]
    num_blocks: int

    def tensors(self) -> Iterator[Tensor]:
        """Each tensor of each layer."""
        for layer in self.layers:
            for field in dict.fromkeys(_FIELDS.values()):
                tensor: Tensor | None = getattr(layer, field)
                if tensor is not None:
                    yield tensor


# Field of a layer's caches that holds a group's tensor.
_FIELDS = {
    LATENT: "latent",
    PACKED: "latent",
    ROPE: "rope",
    KEY: "indexer",
    KEY_C8: "indexer",
    KEY_SCALE: "indexer_scale",
}


def packed_width(spec: ModelSpec) -> int:
    """Bytes of a packed row: a byte per latent, the rotated key in bfloat16, float32 scales."""
    latent, rope = spec.config.kv_lora_rank, spec.config.qk_rope_head_dim
    return latent + rope * _ROPE_BYTES + latent // SCALE_TILE * _SCALE_BYTES


def cached_layers(spec: ModelSpec) -> tuple[int, ...]:
    """The layers of the stage, in the order of their caches; an MTP layer is the last."""
    layers = tuple(spec.placement.layers(spec.config))
    has_mtp = spec.has_mtp and spec.placement.is_last_stage(spec.config)
    return (*layers, spec.config.num_hidden_layers) if has_mtp else layers


def describe_cache_groups(spec: ModelSpec) -> tuple[CacheGroup, ...]:
    """The cache groups of a model or stage; groups without a layer are left out."""
    config, cache = spec.config, spec.cache
    every = cached_layers(spec)
    indexed = [layer for layer in every if config.has_indexer(layer)]
    in_eight = tuple(i for i in indexed if cache.has_c8_keys(i, spec.quantization.key_layers))
    plain = tuple(i for i in indexed if i not in in_eight)
    latents = [
        (LATENT, config.kv_lora_rank, spec.dtype, every),
        (ROPE, config.qk_rope_head_dim, spec.dtype, every),
    ]
    if cache.sparse_sfa_c8:
        latents = [(PACKED, packed_width(spec), cache.eight_bit_type, every)]
    keys = [
        (KEY, config.index_head_dim, spec.dtype, plain),
        (KEY_C8, config.index_head_dim, cache.eight_bit_type, in_eight),
        (KEY_SCALE, 1, cache.key_scale_type, in_eight),
    ]
    return tuple(
        CacheGroup(name=name, width=width, dtype=dtype, layers=layers)
        for name, width, dtype, layers in latents + keys
        if layers
    )


def bytes_per_block(spec: ModelSpec) -> int:
    """Bytes one block of 128 tokens takes in all layers."""
    return BLOCK_SIZE * sum(group.bytes_per_token for group in describe_cache_groups(spec))


def allocate(spec: ModelSpec, num_blocks: int) -> KVCaches:
    """Allocate zeroed caches of `num_blocks` blocks, scratch block 0 included."""
    assert num_blocks > 1, "block 0 is scratch: at least two blocks are needed"
    groups = describe_cache_groups(spec)

    def layer_cache(layer: int) -> LayerCache:
        tensors: dict[str, Tensor | None] = dict.fromkeys(_FIELDS.values())
        for group in groups:
            if layer in group.layers:
                # Zeros, not empty: scratch rows are read by padding and must stay finite.
                cache = _zeros(group.shape(num_blocks), group.dtype, spec.device)
                tensors[_FIELDS[group.name]] = cache
        latent = tensors.pop("latent")
        assert latent is not None
        return LayerCache(latent=latent, **tensors)

    layers = tuple(layer_cache(layer) for layer in cached_layers(spec))
    return KVCaches(layers=layers, num_blocks=num_blocks)


def check_layout(spec: ModelSpec, caches: KVCaches) -> None:
    """Refuse caches that are not laid out as the model reads and writes them.

    A kernel cannot tell: it would take a packed cache for a plain one, or run past its end.

    Raises:
        ConfigError: The first cache that is missing, too much, or of another form, by its layer.
    """
    layers = cached_layers(spec)
    if len(caches.layers) != len(layers):
        raise ConfigError(
            f"KV caches of {len(caches.layers)} layers, must be of {len(layers)}: "
            f"layers {layers[0]} to {layers[-1]}"
        )
    groups = describe_cache_groups(spec)
    for layer, cache in zip(layers, caches.layers, strict=True):
        due = {_FIELDS[group.name]: group for group in groups if layer in group.layers}
        for field in dict.fromkeys(_FIELDS.values()):
            found: Tensor | None = getattr(cache, field)
            violations = _violations(found, due.get(field), caches.num_blocks, spec.device)
            if reason := next(violations, ""):
                raise ConfigError(f"KV cache of layer {layer}: {field} {reason}")


def _violations(
    found: Tensor | None, due: CacheGroup | None, num_blocks: int, device: torch.device
) -> Iterator[str]:
    """What is wrong with one cache, the first thing first."""
    if due is None or found is None:
        if found is not None:
            yield "is there, and the layer has none in this format"
        elif due is not None:
            yield f"is missing: must be a {due.name} cache"
        return
    shape = due.shape(num_blocks)
    if found.shape != shape:
        yield f"is {tuple(found.shape)}, must be {shape} ({due.name})"
    if found.dtype is not due.dtype:
        yield f"is {found.dtype}, must be {due.dtype} ({due.name})"
    if not found.is_contiguous():
        yield f"has strides {found.stride()}: must be contiguous"
    if found.device.type != device.type or device.index not in {None, found.device.index}:
        yield f"is on {found.device}, must be on {device}"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU without touching the memory.

    torch.zeros writes every page: 0.4 to 1 s for the default 512 MiB, at each start. Fresh pages of
    the system are zero already, and whoever serves has them taken in the background (prefault.py).
    """
    if device.type != "cpu":
        # As bytes: not every device fills every 8-bit type.
        sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.zeros(sizes, dtype=torch.int8, device=device).view(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    cache = torch.from_numpy(memory[start : start + size])
    prefer_huge_pages(cache)
    return cache.view(dtype).view(shape)
