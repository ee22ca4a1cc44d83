"""Bytes of a rank's weights: its part of the model, built without storage and counted.

What is counted are the tensors that the model's own modules hold once loading is finished, so a
plan says what a worker allocates. Absorbed matrices are counted, `kv_b_proj` itself never exists.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from services.worker.model.decoder import Decoder
from services.worker.model.experts_int4 import Int4Experts
from services.worker.model.layer import Dense
from services.worker.model.spec import ModelSpec

_META: Final = torch.device("meta")
_MODEL: Final = ("services.worker.model", "services.worker.quant")


class WeightClass(StrEnum):
    """What a weight is for; the values head the columns of a plan."""

    EMBEDDINGS = "embeddings"
    ATTENTION = "attention"
    ABSORBED = "absorbed kv_b"
    INDEXER = "indexer"
    DENSE = "dense MLP"
    EXPERTS = "experts"
    SHARED = "shared"
    ROUTER = "router"
    NORMS = "norms"
    MTP = "MTP"
    ROTARY = "rotary tables"


# The first part of a tensor's path that is named here tells its class.
_BY_ATTRIBUTE: Final = {
    "mtp": WeightClass.MTP,
    "embed_tokens": WeightClass.EMBEDDINGS,
    "lm_head": WeightClass.EMBEDDINGS,
    "rotary": WeightClass.ROTARY,
    "norm": WeightClass.NORMS,
    "input_layernorm": WeightClass.NORMS,
    "post_attention_layernorm": WeightClass.NORMS,
    "indexer": WeightClass.INDEXER,
    "W_UK_T": WeightClass.ABSORBED,
    "W_UV": WeightClass.ABSORBED,
    "gate": WeightClass.ROUTER,
    "experts": WeightClass.EXPERTS,
    "shared_experts": WeightClass.SHARED,
}
_BY_PARENT: Final = {"self_attn": WeightClass.ATTENTION, "mlp": WeightClass.DENSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of one rank's weights by class."""

    by_class: Mapping[WeightClass, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_class.values())

    def __getitem__(self, name: WeightClass) -> int:
        return self.by_class.get(name, 0)


def weigh_rank(spec: ModelSpec) -> WeightBytes:
    """Bytes of the weights of the rank that a spec describes, wherever it would be built.

    Raises:
        ConfigError: The model cannot be placed so.
        CheckpointError: A layer has a type that the model does not compute with.
    """
    # The blocked layout has the same bytes: all sides of quantized matrices are whole blocks.
    decoder = Decoder.build(replace(spec, device=_META, weight_nz_mode=0))
    _check_parts(decoder)
    return weigh(decoder)


def weigh(decoder: Decoder) -> WeightBytes:
    """Bytes of the tensors that a model holds; one held twice counts once."""
    if decoder.device == _META:
        _finish_experts(decoder)
    sums: dict[WeightClass, int] = {}
    for path, tensor in _tensors(decoder, (), set()):
        name = _class_of(path)
        sums[name] = sums.get(name, 0) + _size(tensor)
    return WeightBytes(by_class=sums)


def _check_parts(decoder: Decoder) -> None:
    """Refuse parts that the loader could not take: ask one layer of each kind for its slots."""
    kinds = {(type(layer.mlp), layer.self_attn.indexer is None): layer for layer in decoder.layers}
    for layer in kinds.values():
        for _ in layer.slots():
            pass


def _finish_experts(decoder: Decoder) -> None:
    """Loading changes the type of scales of packed experts; other modules keep their bytes."""
    for layer in [*decoder.layers, *([decoder.mtp.layer] if decoder.mtp else [])]:
        if not isinstance(layer.mlp, Dense):
            experts = layer.mlp.experts
            if isinstance(experts, Int4Experts):
                experts.finish_loading()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _class_of(path: tuple[str, ...]) -> WeightClass:
    for name in path:
        if name in _BY_ATTRIBUTE:
            return _BY_ATTRIBUTE[name]
    for name in path:
        if name in _BY_PARENT:
            return _BY_PARENT[name]
    raise AssertionError(f"a tensor without a class: {'.'.join(path)}")


def _tensors(
    value: object, path: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Tensors below an object, with the attributes that lead there; each object once.

    A view of a tensor is none of its own.
    """
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        memory = value.untyped_storage()._cdata
        if memory not in seen:
            seen.add(memory)
            yield path, value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry, path, seen)
    elif type(value).__module__.startswith(_MODEL) and hasattr(value, "__dict__"):
        seen.add(id(value))
        for name, entry in vars(value).items():
            yield from _tensors(entry, (*path, name), seen)
