"""What a ``quant_model_description.json`` may say: its keys, its types, and what must agree.

Names of tensors have dots, the keys that speak of the whole checkpoint have none. Every tensor has
an entry and every entry a tensor, but for a few that other programs read.
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, Final

from shared.errors import CheckpointError

FLOAT: Final = "FLOAT"
PACKED_INT4: Final = "W4A8_DYNAMIC"
VERSION: Final = "1.0.0"
"""The layout in which int4 weights have one scale per output and lie two to a byte."""

SERVED: Final = frozenset({FLOAT, "W8A8", "W8A8_DYNAMIC", PACKED_INT4})

# Types of ModelSlim that need kernels or caches of another kind.
_UNSERVED: Final = frozenset(
    {
        "W8A8_MIX",
        "W8A16",
        "W4A4_DYNAMIC",
        "W4A16",
        "WFP8AFP8_DYNAMIC",
        "W8A8_MXFP8",
        "W4A8_MXFP",
        "W4A4_MXFP4",
        "C8",
        "FAQuant",
    }
)
# Keys of the whole checkpoint that ask for caches of formats that are not built.
_UNSERVED_KEYS: Final = ("kv_quant_type", "kv_cache_type", "fa_quant_type")
_NOTHING: Final = (None, "", "NONE", "none", FLOAT)

# How a layer's 8-bit indexer keys are told: entries without a tensor.
KEY_ENTRIES: Final = (".indexer.quant_type", ".indexer.wq_b_weight")
KEY_TYPE: Final = "INT8_DYNAMIC"
_KEY_TYPES: Final = frozenset({KEY_TYPE, "QK_INT8_DYNAMIC", "W8A8_MXFP8"})
# Tensors that the cache operators or drafts of another kind read, and the model itself does not.
_ROTATIONS: Final = (".indexer.q_rot", ".indexer.k_rot")
_DRAFT_ROTATION: Final = "rot."

# Tensors that belong to the quantized matrix beside them.
_PARTNERS: Final = frozenset(
    {
        "weight_scale",
        "weight_offset",
        "scale_bias",
        "input_scale",
        "input_offset",
        "deq_scale",
        "quant_bias",
    }
)
# Columns and groups of the layout before version 1.0.0.
_OLD_PARTNERS: Final = ("weight_scale_second", "weight_offset_second")
_KEYS: Final = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.\w+")
_EXPERT: Final = re.compile(r"(.+\.experts\.)\d+\.(?:gate|up|down)_proj\.weight")


def read_types(values: Mapping[str, Any], source: str) -> Mapping[str, str]:
    """The entries of a description: tensor name -> type, and how indexer keys are kept.

    Args:
        values: The parsed file.
        source: Its name, for messages.

    Raises:
        CheckpointError: A type is unknown or not served, or the layout is not.
    """
    types = {name: kind for name, kind in values.items() if "." in name}
    for name, kind in types.items():
        fault = _type_fault(name, kind)
        if fault:
            raise CheckpointError(f"{source}: {name}: {fault}")
    for key in _UNSERVED_KEYS:
        if values.get(key) not in _NOTHING:
            raise CheckpointError(f"{source}: {key} is {values[key]!r}, which is not served")
    if PACKED_INT4 in types.values():
        _check_int4_layout(values, types, source)
    return MappingProxyType(types)


def _type_fault(name: str, kind: object) -> str:
    if not isinstance(kind, str):
        return f"has {kind!r} for a type, must be one of {', '.join(sorted(SERVED))}"
    if name.endswith((*KEY_ENTRIES, *_ROTATIONS)) or kind in SERVED:
        return ""
    known = "type" if kind in _UNSERVED else "unknown type"
    return f"{known} {kind} is not served, only {', '.join(sorted(SERVED))}"


def _check_int4_layout(values: Mapping[str, Any], types: Mapping[str, str], source: str) -> None:
    """Refuse the two layouts of int4 weights that are not two to a byte with a scale per output."""
    size = values.get("group_size", 0)
    if size != 0:
        raise CheckpointError(
            f"{source}: group_size is {size!r}: int4 weights with a scale per group of inputs are "
            "not served, only group_size 0"
        )
    version = values.get("version")
    old = next((name for name in types if name.endswith(_OLD_PARTNERS)), None)
    if version != VERSION or old is not None:
        told = f"has {old}" if version == VERSION else f"version is {version!r}"
        raise CheckpointError(
            f"{source}: {told}: int4 weights of the layout before {VERSION} (one to a byte) are "
            "not served; export the checkpoint again"
        )


def key_layers(types: Mapping[str, str]) -> frozenset[int] | None:
    """Layers whose indexer keys are told to be in eight bits; None if nothing is told of keys."""
    found = [(name, kind) for name, kind in types.items() if name.endswith(KEY_ENTRIES)]
    if not found:
        return None
    matches = [_KEYS.fullmatch(name) for name, kind in found if kind in _KEY_TYPES]
    return frozenset(int(match.group(1)) for match in matches if match)


def find_faults(types: Mapping[str, str], names: AbstractSet[str]) -> Iterator[str]:
    """Where a description and the tensors of its checkpoint disagree, or its entries do.

    Args:
        types: From `read_types`.
        names: Every tensor in the checkpoint's files.
    """
    for name in sorted(names - types.keys()):
        if not _is_rotation(name):
            yield f"{name}: is in the checkpoint and has no entry"
    for name in sorted(types.keys() - names):
        if name.endswith(KEY_ENTRIES):
            if f"{name.rpartition('.')[0]}.wq_b.weight" not in names:
                yield f"{name}: has an entry, and the layer has no indexer"
        elif not _is_rotation(name):
            yield f"{name}: has an entry and is in no file"
    yield from _partner_faults(types)
    yield from _expert_faults(types)


def _is_rotation(name: str) -> bool:
    return name.startswith(_DRAFT_ROTATION) or name.endswith(_ROTATIONS)


def _partner_faults(types: Mapping[str, str]) -> Iterator[str]:
    """Tensors of one matrix that are described differently."""
    for name, kind in types.items():
        stem, _, leaf = name.rpartition(".")
        weight = types.get(f"{stem}.weight", kind)
        if leaf in _PARTNERS and kind != weight:
            yield f"{name}: is {kind}, and its weight is {weight}"


def _expert_faults(types: Mapping[str, str]) -> Iterator[str]:
    """Experts of one layer that are not all described alike: they are one product."""
    first: dict[str, tuple[str, str]] = {}
    for name, kind in types.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            continue
        other, other_kind = first.setdefault(found.group(1), (name, kind))
        if kind != other_kind:
            yield f"{name}: is {kind}, and {other} is {other_kind}"
