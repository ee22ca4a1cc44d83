"""What every layer of one step reads, computed once from the metadata."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.model.rope import RotaryTables


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Metadata of a step in the types the operators want, with its rotary angles."""

    slots: Tensor
    """[T] int64: the cache write of the NPU takes no int32."""
    cos: Tensor
    """[T, 1, 1, 64]."""
    sin: Tensor
    """[T, 1, 1, 64]."""
    cum_query_lens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    traffic: ExpertTraffic | None = None

    @classmethod
    def prepare(cls, step: StepMetadata, tables: RotaryTables) -> "StepInputs":
        """Look up angles and widen slots."""
        cos, sin = tables.at(step.positions)
        return cls(
            slots=step.slot_mapping.to(torch.int64),
            cos=cos,
            sin=sin,
            cum_query_lens=step.cum_query_lens,
            seq_lens=step.seq_lens,
            block_table=step.block_table,
            traffic=step.traffic,
        )
