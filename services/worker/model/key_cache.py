"""Writing and reading the indexer's key cache of one layer, plain or in eight bits.

Eight bits (LI C8) hold a key whose size is spread evenly over its lanes best. So keys and queries
are rotated by one orthogonal matrix first, which leaves every product as it was.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from shared.errors import ConfigError

# Of npu_quant_lightning_indexer; the operator on plain keys goes further.
_MAX_TOPK = 2048


class KeyCache(Protocol):
    """How a layer's indexer keys are kept, and how positions are selected by them."""

    def write(self, keys: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Keep `keys` [T, Di] at the step's slots."""
        ...

    def rows(self, keys: Tensor) -> Sequence[Tensor]:
        """What `write` would keep of `keys`, as rows [T, N] that travel."""
        ...

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """Keep such rows at `slots`."""
        ...

    def select(
        self, queries: Tensor, weights: Tensor, step: StepInputs, cache: LayerCache
    ) -> Tensor:
        """The best positions [T, 1, K] for queries [T, Hi, Di] and head weights [T, Hi]."""
        ...

    def finish_loading(self) -> None:
        """Bring what it multiplies by into the form that products want."""
        ...


def make_key_cache(spec: ModelSpec, layer: int) -> KeyCache:
    """The form that the spec and the checkpoint ask for in one layer.

    Raises:
        ConfigError: More positions are selected than the operator on 8-bit keys can.
    """
    if not spec.cache.has_c8_keys(layer, spec.quantization.key_layers):
        return PlainKeyCache(spec)
    if spec.config.index_topk > _MAX_TOPK:
        raise ConfigError(
            f"config.json: index_topk={spec.config.index_topk}: at most {_MAX_TOPK} with "
            "--enable-sparse-li-c8"
        )
    return QuantizedKeyCache(spec)


class PlainKeyCache:
    """Keys in the model's type."""

    def __init__(self, spec: ModelSpec) -> None:
        self._width = spec.config.index_head_dim
        self._topk = spec.config.index_topk

    def write(self, keys: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Write rows of keys."""
        self.store(self.rows(keys), step.slots, cache)

    def rows(self, keys: Tensor) -> Sequence[Tensor]:
        """The keys themselves."""
        return (keys,)

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """One scatter."""
        assert cache.indexer is not None
        target = cache.indexer.view(-1, self._width)
        torch.ops.npu.npu_scatter_nd_update_(target, slots.view(-1, 1), rows[0])

    def select(
        self, queries: Tensor, weights: Tensor, step: StepInputs, cache: LayerCache
    ) -> Tensor:
        """Select on the cached keys themselves."""
        selected: Tensor = torch.ops.npu.npu_lightning_indexer(
            queries,
            cache.indexer,
            weights.contiguous(),
            actual_seq_lengths_query=step.cum_query_lens,
            actual_seq_lengths_key=step.seq_lens,
            block_table=step.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self._topk,
            sparse_mode=3,
        )[0]
        return selected

    def finish_loading(self) -> None:
        """Plain keys are multiplied by nothing."""


class QuantizedKeyCache:
    """Rotated keys in eight bits with a scale per token."""

    def __init__(self, spec: ModelSpec) -> None:
        self._width = spec.config.index_head_dim
        self._topk = spec.config.index_topk
        self._type = spec.cache.eight_bit_type
        self._scale_type = spec.cache.key_scale_type
        self._weight_type = spec.cache.head_weight_type
        # Kept, not made per step: a captured step reads it at its address.
        self._rotation = hadamard(self._width).to(spec.dtype).to(spec.device)

    def write(self, keys: Tensor, step: StepInputs, cache: LayerCache) -> None:
        """Write rows of keys, and their scales beside them."""
        self.store(self.rows(keys), step.slots, cache)

    def rows(self, keys: Tensor) -> Sequence[Tensor]:
        """Bytes of keys, and their scales."""
        lanes, scales = self._quantize(keys)
        return lanes.view(torch.int8), scales.view(-1, 1)

    def store(self, rows: Sequence[Tensor], slots: Tensor, cache: LayerCache) -> None:
        """Two scatters."""
        assert cache.indexer is not None
        assert cache.indexer_scale is not None
        lanes, scales = rows
        at = slots.view(-1, 1)
        target = cache.indexer.view(torch.int8).view(-1, self._width)
        torch.ops.npu.npu_scatter_nd_update_(target, at, lanes)
        torch.ops.npu.npu_scatter_nd_update_(cache.indexer_scale.view(-1, 1), at, scales)

    def select(
        self, queries: Tensor, weights: Tensor, step: StepInputs, cache: LayerCache
    ) -> Tensor:
        """Select on 8-bit keys with 8-bit queries."""
        assert cache.indexer_scale is not None
        lanes, scales = self._quantize(queries.view(-1, self._width))
        selected: Tensor = torch.ops.npu.npu_quant_lightning_indexer(
            lanes.view(queries.shape),
            cache.indexer,
            weights.to(self._weight_type).contiguous(),
            scales.view(weights.shape),
            cache.indexer_scale.squeeze(3),
            query_quant_mode=0,  # a scale per token and head
            key_quant_mode=0,
            actual_seq_lengths_query=step.cum_query_lens,
            actual_seq_lengths_key=step.seq_lens,
            block_table=step.block_table,
            layout_query="TND",
            layout_key="PA_BSND",
            sparse_count=self._topk,
            sparse_mode=3,
        )
        return selected

    def finish_loading(self) -> None:
        """Put the rotation into the order in which it is read."""
        self._rotation = torch.ops.glm.pack_weight(self._rotation)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [N, Di] rotated, in eight bits, and their scales [N]."""
        rotated = torch.ops.glm.linear(rows, self._rotation)
        lanes, scales = torch.ops.npu.npu_dynamic_quant(rotated, dst_type=self._type)
        return lanes, scales.to(self._scale_type)


def hadamard(size: int) -> Tensor:
    """The Sylvester matrix of a power of two, divided by its norm: orthogonal and symmetric."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    assert len(matrix) == size
    scaled: Tensor = matrix * size**-0.5
    return scaled
