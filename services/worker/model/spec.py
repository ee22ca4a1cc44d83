"""What the modules of a model are built from, in one value."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from services.worker.model.beside import Beside, InLine
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import BLOCK_SIZE, ModelConfig
from services.worker.model.placement import WHOLE, Placement
from services.worker.parallel.groups import Groups
from services.worker.quant.scheme import QuantDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's sizes, and how this rank holds it."""

    config: ModelConfig
    dtype: torch.dtype
    """Type of float weights, activations and plain caches; the router stays float32."""
    device: torch.device
    placement: Placement = WHOLE
    groups: Groups = field(default_factory=Groups, repr=False)
    """Whom its ranks exchange tensors with; alone, the model computes this rank's share."""
    beside: Beside = field(default_factory=InLine, repr=False)
    """Where shared experts are computed while tokens travel to the routed ones."""
    quantization: QuantDescription = field(default_factory=QuantDescription)
    cache: CacheFormat = field(default_factory=CacheFormat)
    has_mtp: bool = False
    """Whether the MTP layer is part of it, on the stage that has the head."""
    max_model_len: int | None = None
    """Longest sequence that is served; None: the model's own limit."""
    weight_nz_mode: int = 1
    """Weights kept in the device's blocked layout: 0 none, 1 quantized ones, 2 all that can be."""

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence."""
        return self.max_model_len or self.config.max_position_embeddings

    @property
    def num_positions(self) -> int:
        """Positions that a step may have, in whole blocks."""
        return -(-self.context_length // BLOCK_SIZE) * BLOCK_SIZE
