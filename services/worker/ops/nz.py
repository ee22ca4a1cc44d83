"""Packed weights: matrices in the order in which our kernels read them.

On an NPU `npu_format_cast` brings an int8 or int4 matrix into the layout FRACTAL_NZ ("NZ"), which
plain operators must not touch. On a CPU it gives the layout of ``csrc/nz.h``, as `glm.pack_weight`
does for a float matrix, and the tensor is opaque by construction: shape and type stay, but all rows
are at one address, so whoever reads it as a plain matrix finds one constant. A view or slice is not
flat, which kernels for plain matrices refuse; a copy holds that constant everywhere, which they
refuse too; and a slice passed off as packed differs from the sizes in its header. As on the device,
int8 rows that hold two int4 columns in each byte may be viewed as int32 afterwards.
"""

import math

import torch
from torch import Tensor

from services.worker.ops.checks import require
from services.worker.ops.pages import prefer_huge_pages

FRACTAL_NZ = 29
ND = 2

_OURS = frozenset({"cpu", "meta"})
"""Devices whose packed tensors are of this module; on others the device's library knows."""

_HEADER = 64
_OPAQUE = 0x93
_STRIP = 32
_WORD = 4
_FLIP = 128
_REST = _STRIP * _WORD
"""Bytes behind float matrices, whose kernels read a last narrow strip as if it were whole."""

_UNITS = {
    torch.int8: torch.uint8,
    torch.int32: torch.uint8,  # eight int4 columns, packed as four bytes
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
}
"""What an element of a type is packed as."""
_NAME = "packed weight"


def is_nz(weight: Tensor) -> bool:
    """Whether a kernel must read a weight [..., K, N] as packed."""
    if weight.device.type not in _OURS:
        return bool(torch.ops.npu.get_npu_format(weight) == FRACTAL_NZ)
    return is_packed(weight)


def is_packed(weight: Tensor) -> bool:
    """The same for a weight that is known to lie on a CPU."""
    if weight.stride(-2) != 0:
        return False
    return weight.untyped_storage().nbytes() >= _first_byte(weight.shape[-1] * weight.itemsize)


def sizes(weight: Tensor) -> tuple[int, int, int]:
    """Matrices, their rows, and bytes of a row."""
    is_right = weight.dim() >= 2 and weight.numel() > 0
    require(is_right, _NAME, "{} must be [..., K, N]", tuple(weight.shape))
    is_right = weight.dtype in _UNITS
    require(is_right, _NAME, "{} must be a float, int8, or int32 of 8 int4 columns", weight.dtype)
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
    first, num_bytes = _first_byte(row_bytes), packed_bytes(weight.dtype, matrices, rows, row_bytes)
    rest = _REST if weight.is_floating_point() else 0
    memory = torch.empty(first + num_bytes + rest, dtype=torch.uint8, device=weight.device)
    prefer_huge_pages(memory)
    return memory


def packed_bytes(dtype: torch.dtype, matrices: int, rows: int, row_bytes: int) -> int:
    """Bytes of packed matrices alone."""
    per_word = _WORD // _UNITS[dtype].itemsize
    return matrices * -(-rows // per_word) * per_word * row_bytes


def seal(memory: Tensor, weight: Tensor) -> Tensor:
    """The packed tensor in `memory`, with the shape and type of `weight`."""
    strides = (*[0] * (weight.dim() - 1), 1)
    return memory.view(weight.dtype).as_strided(weight.shape, strides)


def payload(memory: Tensor, row_bytes: int) -> Tensor:
    """The matrices in a packed tensor's memory."""
    return memory[_first_byte(row_bytes) :]


def pack(weight: Tensor) -> Tensor:
    """Pack a plain weight; the compiled kernels write the same bytes."""
    matrices, rows, row_bytes = sizes(weight)
    unit = _UNITS[weight.dtype]
    per_word, columns = _WORD // unit.itemsize, row_bytes // unit.itemsize
    units = weight.contiguous().view(unit).view(matrices, rows, columns)
    padded = torch.nn.functional.pad(units, (0, 0, 0, -rows % per_word))
    if unit is torch.uint8:
        padded ^= _FLIP
    words = padded.view(matrices, -1, per_word, columns).transpose(2, 3)
    strips = [strip.flatten(1) for strip in words.split(_STRIP, dim=2)]
    memory = allocate(weight)
    packed = torch.cat(strips, dim=1).flatten().view(torch.uint8)
    payload(memory, row_bytes)[: len(packed)].copy_(packed)
    return seal(memory, weight)


def unpack(weight: Tensor) -> Tensor:
    """The plain weight with the shape and type of a packed one."""
    matrices, rows, row_bytes = sizes(weight)
    memory = torch.empty(0, dtype=torch.uint8).set_(weight.untyped_storage())
    header = _header(matrices, rows, row_bytes)
    is_whole = weight.storage_offset() == 0 and torch.equal(memory[: header.numel()], header)
    require(is_whole, _NAME, "{} is a part of another one", tuple(weight.shape))
    unit = _UNITS[weight.dtype]
    per_word, columns = _WORD // unit.itemsize, row_bytes // unit.itemsize
    num_bytes = packed_bytes(weight.dtype, matrices, rows, row_bytes)
    packed = payload(memory, row_bytes)[:num_bytes].view(unit).view(matrices, -1)
    groups, strips, first = -(-rows // per_word), [], 0
    for column in range(0, columns, _STRIP):
        width = min(_STRIP, columns - column)
        last = first + groups * width * per_word
        strips.append(packed[:, first:last].reshape(matrices, groups, width, per_word))
        first = last
    padded = torch.cat(strips, dim=2).transpose(2, 3).reshape(matrices, -1, columns)
    units = padded[:, :rows]
    if unit is torch.uint8:
        units = units ^ _FLIP
    return units.flatten().view(weight.dtype).view(weight.shape)


def plain(weight: Tensor) -> Tensor:
    """A weight in any layout as a plain one with one value in each element, int4 in an int8."""
    flat = unpack(weight) if is_nz(weight) else weight
    is_copy = bool((flat.contiguous().view(torch.uint8) == _OPAQUE).all())
    require(not is_copy, _NAME, "{} is a copy of its opaque rows", tuple(weight.shape))
    if flat.dtype is not torch.int32:
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
