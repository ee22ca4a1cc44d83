"""Interleaved rotary embedding in the operator's output order.

Lanes 2i and 2i+1 of the input form pair i. The output holds all first members of the rotated
pairs, then all second members: a permutation that queries and cached keys share.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_same_float
from services.worker.ops.native import Native

ROPE_DIM = 64


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, heads, 1, 64] by `cos`, `sin` [T, 1, 1, 64] (32 values, then again)."""
    _check("npu_interleave_rope", x, cos, sin)
    return rotate_pairs(x, cos, sin)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation itself, for any leading dimensions that broadcast; rounds once."""
    wide = x.float()
    first, second = wide[..., 0::2], wide[..., 1::2]
    half = x.shape[-1] // 2
    cosines, sines = cos[..., :half].float(), sin[..., :half].float()
    rotated = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.cat(rotated, dim=-1).to(x.dtype)


def _native_interleave_rope(native: Native, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _check("npu_interleave_rope", x, cos, sin)
    tokens, heads = x.shape[0], x.shape[1]
    if x.stride(3) != 1:
        x = x.contiguous()
    output = x.new_empty(tokens, heads, 1, ROPE_DIM)
    numbers = (tokens, heads, x.stride(0), x.stride(1))
    native.call("interleave_rope", x.dtype, numbers, x, cos.contiguous(), sin.contiguous(), output)
    return output


def _check(operator: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    require(x.dim() == 4 and x.shape[2] == 1, operator, "x must be [T, heads, 1, 64]")
    require(x.shape[3] == ROPE_DIM, operator, "rotary size {} must be 64", x.shape[3])
    expected = (x.shape[0], 1, 1, ROPE_DIM)
    is_matching = cos.shape == expected and sin.shape == expected
    require(is_matching, operator, "cos and sin must be {}", expected)
    require_same_float(operator, x, cos, sin)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {"npu_interleave_rope": interleave_rope}
    return {"npu_interleave_rope": functools.partial(_native_interleave_rope, native)}
