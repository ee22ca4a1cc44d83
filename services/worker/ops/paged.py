"""How a flattened step (TND) and a paged cache (PA_BSND) are addressed, for the torch versions."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_TILE = 128
"""Query rows handled at once: bounds the extra memory whatever the context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTile:
    """Rows `first` to `last` of the step: queries of one sequence with `num_keys` cached keys."""

    first: int
    last: int
    limits: Tensor
    """[last - first] keys visible to each row: its causal bound."""
    num_keys: int
    blocks: Tensor
    """Block ids of the sequence."""


def row_tiles(
    cum_query_lens: Tensor, seq_lens: Tensor, block_table: Tensor, block_size: int, is_causal: bool
) -> Iterator[RowTile]:
    """Cut the step into tiles of at most `ROW_TILE` rows, each inside one sequence."""
    start = 0
    for sequence, end in enumerate(cum_query_lens.tolist()):
        num_keys = int(seq_lens[sequence])
        blocks = block_table[sequence, : -(-num_keys // block_size)].long()
        for first in range(start, end, ROW_TILE):
            last = min(first + ROW_TILE, end)
            # Right-down causal: the last query sees every key, each earlier one sees one less.
            limits = torch.arange(first, last) + (num_keys - end + 1)
            if not is_causal:
                limits = torch.full_like(limits, num_keys)
            yield RowTile(
                first=first, last=last, limits=limits.clamp(0), num_keys=num_keys, blocks=blocks
            )
        start = end


def gather_rows(cache: Tensor, tile: RowTile) -> Tensor:
    """The tile's cached rows [num_keys, N] in position order, float32."""
    width = cache.shape[-1]
    return cache[tile.blocks].reshape(-1, width)[: tile.num_keys].float()
