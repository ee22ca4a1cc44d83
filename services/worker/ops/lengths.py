"""Lengths of sequences as one of several ranks sees them that cut the tokens of a step.

``torch.ops.glm.cut_lengths`` is ours as `dense` says: torch's by default, and on a CPU a compiled
kernel, which can be part of a recorded step.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous
from services.worker.ops.native import Native

_NAME = "cut_lengths"
SCHEMAS = (
    "cut_lengths(Tensor cum_query_lens, Tensor seq_lens, int first, int count) -> (Tensor, Tensor)",
)


def cut_lengths(
    cum_query_lens: Tensor, seq_lens: Tensor, first: int, count: int
) -> tuple[Tensor, Tensor]:
    """Lengths of the part of each sequence that lies in some rows of a step.

    A sequence that goes on behind those rows has as many keys less as it has rows there, so the
    last row inside sees what it sees in the whole step. One without rows inside has no keys.
    Padding is a last sequence without keys, which has what rows are left.

    Args:
        cum_query_lens: [R] int32, inclusive prefix sum of the rows per sequence.
        seq_lens: [R] int32, keys of each sequence as its last row sees them.
        first: First row.
        count: Rows, which may go beyond the step.

    Returns:
        [R + 1] prefix sum, whose last is `count`, and [R + 1] keys.
    """
    ends = cum_query_lens.clamp(first, first + count) - first
    beyond = (cum_query_lens - (first + count)).clamp_min(0)
    rows = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    keys = (seq_lens - beyond).clamp_min(0).masked_fill(rows == 0, 0)
    padding = torch.full_like(ends[:1], count)
    return torch.cat((ends, padding)), torch.cat((keys, torch.zeros_like(padding)))


def defaults() -> dict[str, Callable[..., object]]:
    """The operator on every device that has no kernel of ours."""
    return {_NAME: cut_lengths}


def _native_cut(
    native: Native, cum_query_lens: Tensor, seq_lens: Tensor, first: int, count: int
) -> tuple[Tensor, Tensor]:
    for lengths in (cum_query_lens, seq_lens):
        is_right = lengths.dtype is torch.int32 and lengths.dim() == 1
        require(is_right, _NAME, "lengths must be [R] int32")
    require(len(cum_query_lens) == len(seq_lens), _NAME, "lengths differ in sequences")
    require_contiguous(_NAME, cum_query_lens, seq_lens)
    num_seqs = len(seq_lens)
    ends, keys = (seq_lens.new_empty(num_seqs + 1) for _ in range(2))
    numbers = (num_seqs, first, count)
    native.call("cut_lengths", torch.float32, numbers, cum_query_lens, seq_lens, ends, keys)
    return ends, keys


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """The kernel; without a compiled one the default stands."""
    if native is None:
        return {}
    return {_NAME: functools.partial(_native_cut, native)}
