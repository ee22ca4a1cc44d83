"""What every layer of one step reads, computed once from the metadata."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import RowShare, Stream, cuts_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Metadata of a step in the types the operators want, with its rotary angles.

    Attention is for all tokens; or, where ranks cut them (DSA-CP), for this rank's T tokens, to
    which angles, lengths and tables belong. Slots are always those of all tokens.
    """

    slots: Tensor
    """Of all tokens, int64: the cache write of the NPU takes no int32."""
    cos: Tensor
    """[T, 1, 1, 64]."""
    sin: Tensor
    """[T, 1, 1, 64]."""
    cum_query_lens: Tensor
    seq_lens: Tensor
    block_table: Tensor
    stream: Stream
    """What passes between blocks."""
    traffic: ExpertTraffic | None = None

    @classmethod
    def prepare(
        cls, step: StepMetadata, tables: RotaryTables, spec: ModelSpec | None = None
    ) -> StepInputs:
        """Look up angles, widen slots, and cut what this rank has a share of.

        Args:
            step: The step.
            tables: Angles by position.
            spec: How the ranks share it; None: there is one rank.
        """
        stream = Stream.alone(step.num_tokens) if spec is None else _stream(step, spec)
        positions, cum, lens = step.positions, step.cum_query_lens, step.seq_lens
        blocks = step.block_table
        if spec is not None and spec.placement.is_dsa_cp:
            share = stream.share
            positions = share.of(positions)
            first = share.rank * share.part
            cum, lens = torch.ops.glm.cut_lengths(cum, lens, first, share.part)
            blocks = _padded_table(blocks)
        cos, sin = tables.at(positions)
        return cls(
            slots=step.slot_mapping.to(torch.int64),
            cos=cos,
            sin=sin,
            cum_query_lens=cum,
            seq_lens=lens,
            block_table=blocks,
            stream=stream,
            traffic=step.traffic,
        )

    @property
    def num_rows(self) -> int:
        """Tokens that this rank attends for."""
        return len(self.cos)


def _stream(step: StepMetadata, spec: ModelSpec) -> Stream:
    placement = spec.placement
    share = RowShare(num_rows=step.num_tokens, size=placement.tp_size, rank=placement.tp_rank)
    is_cut = cuts_stream(spec.config, placement, step.num_tokens)
    return Stream(share=share, group=spec.groups.tp, is_cut=is_cut)


def _padded_table(blocks: Tensor) -> Tensor:
    """With scratch blocks for the sequence that a share's padding belongs to."""
    padded = blocks.new_zeros((len(blocks) + 1, *blocks.shape[1:]))
    padded[:-1] = blocks
    return padded
