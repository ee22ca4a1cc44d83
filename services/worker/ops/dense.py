"""The ordinary products: rows with a matrix, and rows with a matrix per head.

``torch.ops.glm.linear`` and ``torch.ops.glm.head_matmul`` are operators of our own, not of the
device's set: by default they are torch's products, which are right on an NPU. On a CPU, torch packs
the weight anew at each call and sums in an order that depends on the number of rows; the compiled
kernel does neither, so a row's result never depends on its batch.

``torch.ops.glm.pack_weight`` brings a float weight into the order in which that kernel reads it,
once and for all (`services.worker.ops.nz`); elsewhere a weight stays as it is.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import require, require_contiguous, require_same_float
from services.worker.ops.native import Native

SCHEMAS = (
    "linear(Tensor input, Tensor weight) -> Tensor",
    "head_matmul(Tensor input, Tensor weight) -> Tensor",
    "pack_weight(Tensor(a) weight) -> Tensor(a)",
)
_NAME = "linear"
_HEADS = "head_matmul"
_PACK = "pack_weight"


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight``: [T, in] by [in, out], the layout the kernels read in order."""
    return torch.mm(input, weight)


def head_matmul(input: Tensor, weight: Tensor) -> Tensor:
    """``input[:, h] @ weight[h]``: [T, H, M] by [H, M, N] -> [T, H, N]."""
    return torch.bmm(input.transpose(0, 1), weight).transpose(0, 1).contiguous()


def pack_weight(weight: Tensor) -> Tensor:
    """`weight` [..., K, N] as the products want it; nothing but products may read it afterwards."""
    return weight


def defaults() -> dict[str, Callable[..., object]]:
    """The operators on every device that has no kernel of ours."""
    return {_NAME: linear, _HEADS: head_matmul, _PACK: pack_weight}


def is_packed(operator: str, weight: Tensor) -> bool:
    """Whether a float weight is packed; a plain one must be flat."""
    if nz.is_packed(weight):
        return True
    require_contiguous(operator, weight)
    return False


def _native_pack(native: Native, weight: Tensor) -> Tensor:
    require_same_float(_PACK, weight)
    if weight.numel() == 0 or nz.is_packed(weight):
        return weight
    matrices, rows, row_bytes = nz.sizes(weight)
    memory = nz.allocate(weight)
    numbers = (matrices, rows, row_bytes // weight.itemsize)
    packed = nz.payload(memory, row_bytes)
    native.call("pack_floats", weight.dtype, numbers, weight.contiguous(), packed)
    return nz.seal(memory, weight)


def _native_linear(native: Native, input: Tensor, weight: Tensor) -> Tensor:
    require_same_float(_NAME, input, weight)
    packed = is_packed(_NAME, weight)
    tokens, inner = input.shape
    outer = weight.shape[1]
    require(weight.shape[0] == inner, _NAME, "input and weight differ in size")
    rows = input if input.stride(1) == 1 else input.contiguous()
    output = input.new_empty(tokens, outer)
    numbers = (tokens, 1, inner, outer, rows.stride(0), 0, packed)
    native.call("head_matmul", input.dtype, numbers, rows, weight, output)
    return output


def _native_head_matmul(native: Native, input: Tensor, weight: Tensor) -> Tensor:
    require_same_float(_HEADS, input, weight)
    packed = is_packed(_HEADS, weight)
    tokens, heads, inner = input.shape
    outer = weight.shape[2]
    require(weight.shape[:2] == (heads, inner), _HEADS, "input and weight differ in size")
    rows = input if input.stride(2) == 1 else input.contiguous()
    output = input.new_empty(tokens, heads, outer)
    numbers = (tokens, heads, inner, outer, rows.stride(0), rows.stride(1), packed)
    native.call("head_matmul", input.dtype, numbers, rows, weight, output)
    return output


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family; without compiled ones the defaults stand."""
    if native is None:
        return {}
    return {
        _NAME: functools.partial(_native_linear, native),
        _HEADS: functools.partial(_native_head_matmul, native),
        _PACK: functools.partial(_native_pack, native),
    }
