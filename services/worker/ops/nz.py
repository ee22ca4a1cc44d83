"""Packed weights: what `npu_format_cast` makes of an int8 or int4 matrix on a CPU.

On an NPU the cast gives the layout FRACTAL_NZ ("NZ"), which plain operators must not touch. Here it
gives the layout of ``csrc/int8.h``, and the tensor is opaque by construction: shape and type stay,
but all rows are at one address, so whoever reads it as a plain matrix finds one constant. A view or
slice is not flat, which kernels for plain matrices refuse; a copy holds that constant everywhere,
which they refuse too; and a slice passed off as packed differs from the sizes in its header. As on
the device, int8 rows that hold two int4 columns in each byte may be viewed as int32 afterwards.
"""

import math

import torch
from torch import Tensor

from services.worker.ops.checks import require

FRACTAL_NZ = 29
ND = 2

_OURS = frozenset({"cpu", "meta"})
"""Devices whose packed tensors are of this module; on others the device's library knows."""

_HEADER = 64
_OPAQUE = 0x93
_STRIP = 32
_NAME = "packed weight"


def is_nz(weight: Tensor) -> bool:
    """Whether a kernel must read a weight [..., K, N] as packed."""
    if weight.device.type not in _OURS:
        return bool(torch.ops.npu.get_npu_format(weight) == FRACTAL_NZ)
    if weight.stride(-2) != 0:
        return False
    return weight.untyped_storage().nbytes() >= _first_byte(weight.shape[-1] * weight.itemsize)


def sizes(weight: Tensor) -> tuple[int, int, int]:
    """Matrices, their rows, and bytes of a row."""
    is_right = weight.dim() >= 2 and weight.numel() > 0
    require(is_right, _NAME, "{} must be [..., K, N]", tuple(weight.shape))
    is_right = weight.dtype in {torch.int8, torch.int32}
    require(is_right, _NAME, "{} must be int8, or int32 of 8 int4 columns", weight.dtype)
    row_bytes = weight.shape[-1] * weight.itemsize
    return math.prod(weight.shape[:-2]), weight.shape[-2], row_bytes


def allocate(weight: Tensor) -> Tensor:
    """Memory for `weight` packed: all but the matrices is written."""
    matrices, rows, row_bytes = sizes(weight)
    memory = _reserve(weight)
    memory[: _first_byte(row_bytes)] = _header(matrices, rows, row_bytes)
    return memory


def shaped(weight: Tensor) -> Tensor:
    """A packed tensor for `weight` on the meta device: opaque and marked, without memory."""
    return seal(_reserve(weight), weight)


def _reserve(weight: Tensor) -> Tensor:
    matrices, rows, row_bytes = sizes(weight)
    num_bytes = _first_byte(row_bytes) + matrices * -(-rows // 4) * 4 * row_bytes
    return torch.empty(num_bytes, dtype=torch.uint8, device=weight.device)


def seal(memory: Tensor, weight: Tensor) -> Tensor:
    """The packed tensor in `memory`, with the shape and type of `weight`."""
    strides = (*[0] * (weight.dim() - 1), 1)
    return memory.view(weight.dtype).as_strided(weight.shape, strides)


def payload(memory: Tensor, row_bytes: int) -> Tensor:
    """The matrices in a packed tensor's memory."""
    return memory[_first_byte(row_bytes) :]


def pack(weight: Tensor) -> Tensor:
    """Pack a plain weight; the compiled kernel writes the same bytes."""
    matrices, rows, row_bytes = sizes(weight)
    plain_bytes = weight.contiguous().view(torch.uint8).view(matrices, rows, row_bytes)
    padded = torch.nn.functional.pad(plain_bytes, (0, 0, 0, -rows % 4)) ^ 128
    quads = padded.view(matrices, -1, 4, row_bytes).transpose(2, 3)
    strips = [strip.flatten(1) for strip in quads.split(_STRIP, dim=2)]
    memory = allocate(weight)
    payload(memory, row_bytes).copy_(torch.cat(strips, dim=1).flatten())
    return seal(memory, weight)


def unpack(weight: Tensor) -> Tensor:
    """The plain weight with the shape and type of a packed one."""
    matrices, rows, row_bytes = sizes(weight)
    memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
    header = _header(matrices, rows, row_bytes)
    is_whole = weight.storage_offset() == 0 and torch.equal(memory[: header.numel()], header)
    require(is_whole, _NAME, "{} is a part of another one", tuple(weight.shape))
    groups, strips, first = -(-rows // 4), [], 0
    packed = payload(memory, row_bytes).view(matrices, -1)
    for column in range(0, row_bytes, _STRIP):
        width = min(_STRIP, row_bytes - column)
        last = first + groups * width * 4
        strips.append(packed[:, first:last].reshape(matrices, groups, width, 4))
        first = last
    padded = torch.cat(strips, dim=2).transpose(2, 3).reshape(matrices, -1, row_bytes)
    plain_bytes = (padded[:, :rows] ^ 128).flatten()
    return plain_bytes.view(weight.dtype).view(weight.shape)


def plain(weight: Tensor) -> Tensor:
    """A weight in any layout, as int8 [..., K, N] with one value in each element."""
    flat = unpack(weight) if is_nz(weight) else weight
    is_copy = bool((flat.contiguous().view(torch.uint8) == _OPAQUE).all())
    require(not is_copy, _NAME, "{} is a copy of its opaque rows", tuple(weight.shape))
    if flat.dtype is torch.int8:
        return flat
    pairs = flat.contiguous().view(torch.int8)
    # The lower half of a byte is the even column; shifts of int8 keep the sign.
    return torch.stack((pairs << 4 >> 4, pairs >> 4), dim=-1).flatten(-2)


def _first_byte(row_bytes: int) -> int:
    """Where the matrices begin: behind the opaque row and the header."""
    return -(-row_bytes // _HEADER) * _HEADER + _HEADER


def _header(matrices: int, rows: int, row_bytes: int) -> Tensor:
    header = torch.full((_first_byte(row_bytes),), _OPAQUE, dtype=torch.uint8)
    fields = torch.tensor([matrices, rows, row_bytes], dtype=torch.int64).view(torch.uint8)
    header[-_HEADER : -_HEADER + fields.numel()] = fields
    return header
