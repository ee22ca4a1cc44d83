"""Packed weights: what `npu_format_cast` makes of an int8 or int4 matrix on a CPU.

On an NPU the cast gives the layout FRACTAL_NZ ("NZ"), which plain operators must not touch. Here it
gives the layout of ``csrc/int8.h``, and the tensor is opaque by construction: shape and type stay,
but every stride is 0, so whoever reads it as a plain matrix finds one constant. A view or slice is
not flat, which kernels for plain matrices refuse; a copy holds that constant everywhere, which they
refuse too; and a slice passed off as packed differs from the sizes in its header.
"""

import math

import torch
from torch import Tensor

from services.worker.ops.checks import require

FRACTAL_NZ = 29
ND = 2

_HEADER = 64
_OPAQUE = 0x93
_STRIP = 32
_NAME = "npu_format_cast"


def is_nz(tensor: Tensor) -> bool:
    """Whether a kernel must read `tensor` as packed."""
    return tensor.stride(-1) == 0 and tensor.untyped_storage().nbytes() > _HEADER


def num_bits(weight: Tensor) -> int:
    """Bits of one weight: int8, or int4 with 8 columns in an int32 (the first one lowest)."""
    require(weight.dtype in {torch.int8, torch.int32}, _NAME, "{} must be int8 or int32 (int4)",
            weight.dtype)  # fmt: skip
    return 8 if weight.dtype is torch.int8 else 4


def sizes(weight: Tensor) -> tuple[int, int, int, int]:
    """Matrices, rows, columns and bits of a weight [..., K, N] (int4: [..., K, N / 8] int32)."""
    require(weight.dim() >= 2 and weight.numel() > 0, _NAME, "{} must be [..., K, N]", weight.shape)
    bits = num_bits(weight)
    outer = weight.shape[-1] * (1 if bits == 8 else 8)
    return math.prod(weight.shape[:-2]), weight.shape[-2], outer, bits


def allocate(weight: Tensor) -> Tensor:
    """Memory for `weight` packed: the header, then bytes to be written."""
    matrices, inner, outer, bits = sizes(weight)
    size = matrices * -(-inner // _depth(bits)) * 4 * outer
    memory = torch.empty(_HEADER + size, dtype=torch.uint8)
    memory[:_HEADER] = _header(matrices, inner, outer, bits)
    return memory


def seal(memory: Tensor, weight: Tensor) -> Tensor:
    """The packed tensor in `memory`, with the shape and type of `weight`."""
    return memory.view(weight.dtype).as_strided(weight.shape, (0,) * weight.dim())


def pack(weight: Tensor) -> Tensor:
    """Pack a plain weight; the compiled kernel writes the same bytes."""
    matrices, inner, outer, bits = sizes(weight)
    levels = _levels(weight, bits).view(matrices, inner, outer)
    depth = _depth(bits)
    levels = torch.nn.functional.pad(levels, (0, 0, 0, -inner % depth))
    quads = levels.view(matrices, -1, depth // 4, 4, outer)
    if bits == 4:
        quads = quads[:, :, :1] | quads[:, :, 1:] << 4
    rows = quads.squeeze(2).transpose(2, 3)  # [matrices, groups, outer, 4]
    strips = [strip.flatten(1) for strip in rows.split(_STRIP, dim=2)]
    memory = allocate(weight)
    memory[_HEADER:] = torch.cat(strips, dim=1).flatten()
    return seal(memory, weight)


def unpack(weight: Tensor) -> Tensor:
    """The plain weight [..., K, N] as int8, one value in each element for int4 too."""
    matrices, inner, outer, bits = sizes(weight)
    memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
    header = _header(matrices, inner, outer, bits)
    is_whole = weight.storage_offset() == 0 and torch.equal(memory[:_HEADER], header)
    require(is_whole, "NZ weight", "{} is a part of a packed weight", tuple(weight.shape))
    groups = -(-inner // _depth(bits))
    strips, first = [], 0
    payload = memory[_HEADER:].view(matrices, -1)
    for column in range(0, outer, _STRIP):
        width = min(_STRIP, outer - column)
        last = first + groups * width * 4
        strips.append(payload[:, first:last].reshape(matrices, groups, width, 4))
        first = last
    quads = torch.cat(strips, dim=2).transpose(2, 3)  # [matrices, groups, 4, outer]
    if bits == 4:
        quads = torch.cat([quads & 15, quads >> 4], dim=2)
    shift = 128 if bits == 8 else 8
    levels = quads.reshape(matrices, -1, outer)[:, :inner].to(torch.int16) - shift
    return levels.to(torch.int8).view(*weight.shape[:-1], outer)


def plain(weight: Tensor) -> Tensor:
    """Values of a weight in any layout, as int8 [..., K, N]."""
    if is_nz(weight):
        return unpack(weight)
    bits = num_bits(weight)
    if bits == 8:
        return weight
    return (_levels(weight, bits).to(torch.int8) - 8).view(*weight.shape[:-1], -1)


def _levels(weight: Tensor, bits: int) -> Tensor:
    """Weights as unsigned numbers, one in each byte."""
    if bits == 8:
        return weight.contiguous().view(torch.uint8) ^ 128
    pairs = weight.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2) ^ 8


def _depth(bits: int) -> int:
    return 4 if bits == 8 else 8


def _header(matrices: int, inner: int, outer: int, bits: int) -> Tensor:
    opaque = int.from_bytes(bytes([_OPAQUE] * 8), "little", signed=True)
    fields = torch.tensor([opaque, matrices, inner, outer, bits, 0, 0, 0], dtype=torch.int64)
    return fields.view(torch.uint8)
