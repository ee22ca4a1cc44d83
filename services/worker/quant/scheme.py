"""How each weight of a checkpoint is stored, as its ``quant_model_description.json`` says.

The description names a type for every tensor. A linear layer has the type of its weight; layers
that the model computes as one product must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.worker.loading.strict_json import parse_object
from services.worker.quant.description import find_faults, key_layers, read_types
from shared.errors import CheckpointError

DESCRIPTION_FILE = "quant_model_description.json"


class Scheme(StrEnum):
    """Types of weights that the model computes with; the values are ModelSlim's."""

    FLOAT = "FLOAT"
    W8A8 = "W8A8"
    """int8 weights; activations int8 with one scale and zero point from calibration."""
    W8A8_DYNAMIC = "W8A8_DYNAMIC"
    """int8 weights; activations int8 with a scale per token."""
    W4A8_DYNAMIC = "W4A8_DYNAMIC"
    """int4 weights, two to a byte; activations as above. Routed experts only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantDescription:
    """Types of the tensors of one checkpoint."""

    source: str = ""
    """The file, for messages; empty for a checkpoint without one, whose weights are all float."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Tensor name -> type, and entries that tell how indexer keys are kept."""
    is_rot_used: bool = False
    """Whether hidden states are rotated; the MTP layer then needs `rot.weight` and its own head."""
    key_layers: frozenset[int] | None = field(init=False, compare=False, repr=False)
    """Layers whose indexer keys may be in eight bits; None if nothing is told of keys."""

    def __post_init__(self) -> None:
        # One pass over some 240,000 names; each layer asks.
        object.__setattr__(self, "key_layers", key_layers(self.types))

    @property
    def is_quantized(self) -> bool:
        """Whether a description was found."""
        return bool(self.source)

    def scheme(self, prefix: str, parts: Sequence[str]) -> Scheme:
        """The one scheme of layers that are computed together.

        Args:
            prefix: Start of the tensor names, with its dot.
            parts: Names of the layers behind it.

        Raises:
            CheckpointError: A layer is not described, or the layers differ.
        """
        if not self.is_quantized:
            return Scheme.FLOAT
        found = {part: self._type_of(f"{prefix}{part}.weight") for part in parts}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{part} is {kind}" for part, kind in found.items())
            raise CheckpointError(
                f"{self.source}: {prefix}: layers of one product must have one type: {listed}"
            )
        return Scheme(found[parts[0]])

    def _type_of(self, name: str) -> str:
        for alias in _aliases(name):
            if alias in self.types:
                return self.types[alias]
        raise CheckpointError(f"{self.source}: {name}: has no entry")

    def find_faults(self, names: AbstractSet[str]) -> Iterator[str]:
        """Where the description and the tensors of its checkpoint disagree.

        Args:
            names: Every tensor in the checkpoint's files.
        """
        if self.is_quantized:
            for fault in find_faults(self.types, names):
                yield f"{self.source}: {fault}"

    @classmethod
    def from_dir(cls, path: Path) -> QuantDescription:
        """Read a checkpoint's description; without the file every weight is float.

        Raises:
            CheckpointError: The file is damaged, or tells of types or layouts that are not served.
        """
        file = path / DESCRIPTION_FILE
        if not file.exists():
            return cls()
        try:
            values = parse_object(file.read_bytes())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
        return cls.from_dict(values, source=str(file))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str) -> QuantDescription:
        """Take the parsed file; `source` names it in messages."""
        types = read_types(values, source)
        return cls(source=source, types=types, is_rot_used=values.get("is_rot_used") is True)


def _aliases(name: str) -> Iterator[str]:
    """Names under which writers may describe a weight."""
    yield name
    yield f"{name.removesuffix('weight')}weight_packed"
    # A shared head may be described with its own name in front.
    for at, character in enumerate(name):
        if character == ".":
            yield f"{name[:at]}.shared_head{name[at:]}"
