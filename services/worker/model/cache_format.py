"""In which of the paged caches rows are kept in eight bits, and of which types.

The two choices are independent. Packed latents are for all layers; 8-bit indexer keys are for all
layers with an indexer, or for those that the checkpoint's description of its quantization names.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Generation = Literal["a2", "a3", "a5"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """Formats of latents and indexer keys, and for which devices."""

    sparse_sfa_c8: bool = False
    """Latent and rotated key in one packed row of 656 bytes."""
    sparse_li_c8: bool = False
    """Indexer keys as int8 (or float8) with a scale."""
    generation: Generation = "a3"
    """Atlas generation: A5 keeps float8 where the others keep int8."""

    @property
    def eight_bit_type(self) -> torch.dtype:
        """Type of packed rows and of 8-bit keys."""
        return torch.float8_e4m3fn if self.generation == "a5" else torch.int8

    @property
    def key_scale_type(self) -> torch.dtype:
        """Type of the scales of 8-bit keys and of queries."""
        return torch.float32 if self.generation == "a5" else torch.float16

    @property
    def head_weight_type(self) -> torch.dtype:
        """Type of the head weights that the indexer takes with 8-bit keys."""
        return torch.bfloat16 if self.generation == "a5" else torch.float16

    def has_c8_keys(self, layer: int, described: frozenset[int] | None) -> bool:
        """Whether a layer with an indexer keeps its keys in eight bits.

        Args:
            layer: Its number in the checkpoint.
            described: The layers that the checkpoint's description names; None without any word.
        """
        return self.sparse_li_c8 and (described is None or layer in described)
