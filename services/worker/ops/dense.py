"""The ordinary product of rows with a matrix, ``torch.ops.glm.linear``.

An operator of our own, not of the device's set: by default it is torch's product, which is right on
an NPU. On a CPU, torch packs the weight anew at each call and sums in an order that depends on the
number of rows; the compiled kernel does neither, so a row's result never depends on its batch.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.ops.checks import require, require_contiguous, require_same_float
from services.worker.ops.native import Native

SCHEMA = "linear(Tensor input, Tensor weight) -> Tensor"
_NAME = "linear"


def linear(input: Tensor, weight: Tensor) -> Tensor:
    """``input @ weight``: [T, in] by [in, out], the layout the kernels read in order."""
    return torch.mm(input, weight)


def _native_linear(native: Native, input: Tensor, weight: Tensor) -> Tensor:
    require_same_float(_NAME, input, weight)
    require_contiguous(_NAME, weight)
    tokens, inner = input.shape
    outer = weight.shape[1]
    require(weight.shape[0] == inner, _NAME, "input and weight differ in size")
    rows = input if input.stride(1) == 1 else input.contiguous()
    output = input.new_empty(tokens, outer)
    numbers = (tokens, 1, inner, outer, rows.stride(0), 0)
    native.call("head_matmul", input.dtype, numbers, rows, weight, output)
    return output


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family; without compiled ones the default stands."""
    return {} if native is None else {_NAME: functools.partial(_native_linear, native)}
