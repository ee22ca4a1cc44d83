"""Quantization of latents on their way into the packed cache: one scale for each 128 lanes."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import FLOATS, require
from services.worker.ops.native import Native
from services.worker.ops.row_quant import quantize_rows
from services.worker.ops.scalar_types import to_dtype

_NAME = "npu_dynamic_block_quant"
_TILE = 128
_TARGETS = (torch.int8, torch.float8_e4m3fn)
_LARGEST_FLOAT8 = 448.0


def dynamic_block_quant(
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = _TILE,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Quantize `x` in tiles of one row by 128 lanes.

    Args:
        x: [T, N] or [T, 1, N], N a multiple of 128.
        min_scale: 0 only, no least scale.
        round_mode: "rint" only.
        dst_type: int8, or float8_e4m3fn as on an A5.
        row_block_size: 1 only.
        col_block_size: 128 only.
        dst_type_max: 0 only, the type's own largest number.

    Returns:
        `x / scale` rounded, in x's shape; scales float32, N / 128 in place of N. A tile of zeros
        has scale 0; one with a NaN or an infinity gives zeros under a scale that is not finite, so
        that a reader of the row gets NaN.
    """
    target = _check(x, dst_type, (row_block_size, col_block_size))
    _check_modes(min_scale, round_mode, dst_type_max)
    tiles = x.unflatten(-1, (-1, _TILE))
    if target is torch.int8:
        lanes, scale = quantize_rows(tiles)
        return lanes.flatten(-2), scale
    scale = tiles.float().abs().amax(-1) / _LARGEST_FLOAT8
    is_usable = scale.isfinite() & (scale > 0)
    levels = tiles / torch.where(is_usable, scale, 1.0)[..., None]
    return torch.where(is_usable[..., None], levels, 0.0).flatten(-2).to(target), scale


def _native_block_quant(
    native: Native,
    x: Tensor,
    *,
    min_scale: float = 0.0,
    round_mode: str = "rint",
    dst_type: int = 1,
    row_block_size: int = 1,
    col_block_size: int = _TILE,
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    target = _check(x, dst_type, (row_block_size, col_block_size))
    _check_modes(min_scale, round_mode, dst_type_max)
    if target is not torch.int8:
        return dynamic_block_quant(x, dst_type=dst_type)
    width = x.shape[-1]
    if x.stride(-1) != 1 or (x.dim() == 3 and x.shape[1] != 1):
        x = x.contiguous()
    stride = width if x.is_contiguous() else x.stride(0)
    y = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty((*x.shape[:-1], width // _TILE), dtype=torch.float32)
    numbers = (x.numel() // width, width, stride)
    native.call("block_quant", x.dtype, numbers, x, y, scale)
    return y, scale


def _check(x: Tensor, dst_type: object, tile: tuple[int, int]) -> torch.dtype:
    """The type of the result."""
    is_tiled = x.dim() in {2, 3} and x.shape[-1] % _TILE == 0
    require(is_tiled, _NAME, "x must be [T, N] or [S, T, N] with N a multiple of 128")
    require(x.dtype in FLOATS, _NAME, "{} must be bfloat16 or float32", x.dtype)
    require(tile == (1, _TILE), _NAME, "tiles of {} must be 1 by 128", tile)
    target = to_dtype(dst_type)
    require(target in _TARGETS, _NAME, "dst_type {} must be int8 or float8_e4m3fn", dst_type)
    assert target is not None
    return target


def _check_modes(min_scale: float, round_mode: str, dst_type_max: float) -> None:
    require(min_scale == 0.0, _NAME, "min_scale {} must be 0", min_scale)
    require(round_mode == "rint", _NAME, "round_mode {!r} must be 'rint'", round_mode)
    require(dst_type_max == 0.0, _NAME, "dst_type_max {} must be 0", dst_type_max)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_NAME: dynamic_block_quant}
    return {_NAME: functools.partial(_native_block_quant, native)}
