"""How each weight of a checkpoint is stored, as its ``quant_model_description.json`` says.

The description names a type for every tensor. A linear layer has the type of its weight; layers
that the model computes as one product must agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

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
    """Tensor name -> type."""
    is_rot_used: bool = False
    """Whether hidden states are rotated; the MTP layer then needs `rot.weight` and its own head."""

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
            CheckpointError: A layer is not described, has a type that is not served, or the layers
                differ.
        """
        if not self.is_quantized:
            return Scheme.FLOAT
        found = {part: self._type_of(f"{prefix}{part}.weight") for part in parts}
        if len(set(found.values())) > 1:
            listed = ", ".join(f"{part} is {kind}" for part, kind in found.items())
            raise CheckpointError(
                f"{self.source}: {prefix}: layers of one product must have one type: {listed}"
            )
        kind = found[parts[0]]
        if kind not in {scheme.value for scheme in Scheme}:
            raise CheckpointError(
                f"{self.source}: {prefix}{parts[0]}.weight: type {kind} is not served, only "
                f"{', '.join(Scheme)}"
            )
        return Scheme(kind)

    def _type_of(self, name: str) -> str:
        for alias in (name, f"{name.removesuffix('weight')}weight_packed"):
            if alias in self.types:
                return self.types[alias]
        raise CheckpointError(f"{self.source}: {name}: has no entry")

    @classmethod
    def from_dir(cls, path: Path) -> QuantDescription:
        """Read a checkpoint's description; without the file every weight is float."""
        file = path / DESCRIPTION_FILE
        if not file.exists():
            return cls()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file}: must hold one JSON object")
        return cls.from_dict(values, source=str(file))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str) -> QuantDescription:
        """Keep the entries that are types; some writers name a shared head twice."""
        types = {name: kind for name, kind in values.items() if isinstance(kind, str)}
        alias = ".shared_head."
        types |= {n.replace(alias, "."): kind for n, kind in types.items() if alias in n}
        return cls(source=source, types=types, is_rot_used=values.get("is_rot_used") is True)
