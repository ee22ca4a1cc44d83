"""Operators of torch that move data in a step, done by compiled kernels, which can be recorded.

They give torch's numbers to the last bit. What the model uses beyond these forms is refused, and
with that the recording.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from services.worker.graphs.recording import CaptureError
from services.worker.ops.native import Native

_ATEN = torch.ops.aten
_KIND = torch.float32  # kernels that serve all types are filed under this one

_EQUALS, _LESS, _NO_LESS = range(3)
"""Comparisons as csrc/move.c numbers them."""

_TYPE_NUMBERS: Mapping[torch.dtype, int] = MappingProxyType(
    {
        torch.float32: 0,
        torch.bfloat16: 1,
        torch.float16: 2,
        torch.int32: 3,
        torch.int64: 4,
        torch.int8: 5,
        torch.uint8: 5,
        torch.bool: 5,
    }
)
"""Element types as csrc/move.c numbers them."""

_CONVERSIONS = frozenset(
    {
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
        (torch.int32, torch.int64),
    }
)


def lowered(native: Native) -> Mapping[OpOverload, Callable[..., object]]:
    """What stands for each operator."""
    kernels: dict[OpOverload, Callable[..., object]] = {
        _ATEN.embedding.default: _embedding,
        _ATEN.index_select.default: _index_select,
        _ATEN._to_copy.default: _to_copy,
        _ATEN.clone.default: _clone,
        _ATEN.copy_.default: _copy,
        _ATEN.cat.default: _cat,
        _ATEN.stack.default: _stack,
        _ATEN.add_.Tensor: _add,
        _ATEN.cumsum.default: _cumsum,
        _ATEN.eq.Scalar: _equals,
        _ATEN.lt.Scalar: _is_less,
        _ATEN.ge.Scalar: _is_no_less,
        _ATEN.sub.Tensor: _subtract,
        _ATEN.bitwise_or.Tensor: _either,
        _ATEN.masked_fill.Scalar: _masked_fill,
        _ATEN.masked_fill_.Scalar: _masked_fill_in_place,
        _ATEN.clamp_min.default: _clamp_min,
        _ATEN.all.default: _all,
        _ATEN.new_zeros.default: _new_zeros,
        _ATEN.zeros_like.default: _zeros_like,
    }
    return {operator: functools.partial(kernel, native) for operator, kernel in kernels.items()}


def _require(holds: bool, form: str) -> None:
    if not holds:
        raise CaptureError(f"a recorded step takes {form} only")


def _embedding(native: Native, weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    return _take(native, weight, indices)


def _index_select(native: Native, input: Tensor, dim: int, index: Tensor) -> Tensor:
    _require(dim == 0, "rows of index_select")
    return _take(native, input, index)


def _take(native: Native, table: Tensor, index: Tensor) -> Tensor:
    is_right = table.is_contiguous() and index.is_contiguous() and index.dtype is torch.int64
    _require(is_right and index.dim() == 1, "flat tables and int64 indices [N]")
    output = table.new_empty((len(index), *table.shape[1:]))
    row_bytes = math.prod(table.shape[1:]) * table.itemsize
    native.call("take_rows", _KIND, (len(index), row_bytes, len(table)), index, table, output)
    return output


def _to_copy(
    native: Native, input: Tensor, *, dtype: torch.dtype | None = None, **options: object
) -> Tensor:
    _require(not any(options.values()), "another type of _to_copy")
    output = input.new_empty(input.shape, dtype=dtype or input.dtype)
    return _copy(native, output, input)


def _clone(native: Native, input: Tensor, *, memory_format: object = None) -> Tensor:
    _require(memory_format in {None, torch.contiguous_format, torch.preserve_format}, "flat clones")
    return _copy(native, input.new_empty(input.shape), input)


def _copy(native: Native, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    types = source.dtype, target.dtype
    is_copy = types[0] is types[1] and types[0] in _TYPE_NUMBERS
    _require(is_copy or types in _CONVERSIONS, f"no {types[0]} as {types[1]}: others")
    _require(source.dim() > 0 and source.shape == target.shape, "copies of equal shapes")
    if not source.numel():
        return target
    rows, width = math.prod(source.shape[:-1]), source.shape[-1]
    strides = (_row_stride(source), _row_stride(target))
    numbers = (_TYPE_NUMBERS[types[0]], _TYPE_NUMBERS[types[1]])
    native.call("convert", _KIND, (rows, width, *strides, *numbers), source, target)
    return target


def _row_stride(tensor: Tensor) -> int:
    """How far apart rows are along the last dimension."""
    *strides, last = tensor.stride()
    *sizes, width = tensor.shape
    _require(last == 1 or width == 1, "rows without gaps")
    step, expected = 0, 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        _require(not step or stride == expected, "rows that lie evenly")
        step = step or stride
        expected = stride * size
    return step or width


def _cat(native: Native, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    dim %= first.dim()
    _require(dim == first.dim() - 1, "cat along the last dimension")
    _require(all(part.dtype is first.dtype for part in tensors), "cat of one type")
    width = sum(part.shape[-1] for part in tensors)
    output = first.new_empty((*first.shape[:-1], width))
    parts = output.split_with_sizes([part.shape[-1] for part in tensors], dim)
    for part, source in zip(parts, tensors, strict=True):
        _copy(native, part, source)
    return output


def _stack(native: Native, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    _require(dim == 0, "stack along a new first dimension")
    output = first.new_empty((len(tensors), *first.shape))
    for part, source in zip(output.split_with_sizes([1] * len(tensors), 0), tensors, strict=True):
        _copy(native, part[0], source)
    return output


def _add(native: Native, input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    is_right = input.shape == other.shape and input.is_contiguous() and other.is_contiguous()
    is_right &= input.dtype is other.dtype and input.dtype in {torch.bfloat16, torch.float32}
    _require(is_right and alpha == 1, "add_ of two alike, flat and floating")
    native.call("add", input.dtype, (input.numel(),), other, input)
    return input


def _cumsum(native: Native, input: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    is_right = input.dim() == 1 and input.dtype is torch.int64 and dtype in {None, torch.int64}
    _require(is_right and input.is_contiguous(), "cumsum of flat int64 [N]")
    output = torch.empty_like(input)
    native.call("cumsum", _KIND, (len(input),), input, output)
    return output


def _equals(native: Native, input: Tensor, other: float) -> Tensor:
    return _compare(native, input, other, _EQUALS)


def _is_less(native: Native, input: Tensor, other: float) -> Tensor:
    return _compare(native, input, other, _LESS)


def _is_no_less(native: Native, input: Tensor, other: float) -> Tensor:
    return _compare(native, input, other, _NO_LESS)


def _compare(native: Native, input: Tensor, other: float, kind: int) -> Tensor:
    is_right = input.dtype in {torch.int32, torch.int64} and isinstance(other, int)
    _require(is_right and input.is_contiguous(), "comparisons of flat whole numbers with one")
    output = input.new_empty(input.shape, dtype=torch.bool)
    numbers = (input.numel(), input.dtype is torch.int64, kind, other)
    native.call("compare", _KIND, numbers, input, output)
    return output


def _subtract(native: Native, input: Tensor, other: float, *, alpha: float = 1) -> Tensor:
    is_right = input.dtype is torch.int64 and isinstance(other, int) and alpha == 1
    _require(is_right and input.is_contiguous(), "flat int64 less a whole number")
    output = torch.empty_like(input)
    native.call("subtract", _KIND, (input.numel(), other), input, output)
    return output


def _either(native: Native, input: Tensor, other: Tensor) -> Tensor:
    is_right = input.dtype is other.dtype is torch.bool and input.shape == other.shape
    is_right &= input.is_contiguous() and other.is_contiguous()
    _require(is_right, "flat truth values with others")
    output = torch.empty_like(input)
    native.call("either", _KIND, (input.numel(),), input, other, output)
    return output


def _masked_fill(native: Native, input: Tensor, mask: Tensor, value: float) -> Tensor:
    return _mask(native, input, mask, value, torch.empty_like(input))


def _masked_fill_in_place(native: Native, input: Tensor, mask: Tensor, value: float) -> Tensor:
    return _mask(native, input, mask, value, input)


def _mask(native: Native, input: Tensor, mask: Tensor, value: float, output: Tensor) -> Tensor:
    """The mask has one entry for each number, or for each row, or for all."""
    _require(input.is_contiguous() and mask.is_contiguous() and value == 0, "flat masks, zeros in")
    per_row = (*input.shape[:-1], 1)
    if mask.shape == input.shape:
        rows, width = input.numel(), 1
    else:
        _require(mask.shape == per_row or mask.numel() == 1, "masks of numbers, rows or all")
        rows, width = math.prod(input.shape[:-1]), input.shape[-1]
    numbers = (rows, width * input.itemsize, int(mask.numel() > 1))
    native.call("mask_rows", _KIND, numbers, input, mask, output)
    return output


def _clamp_min(native: Native, input: Tensor, min: float) -> Tensor:
    is_right = input.dtype is torch.int32 and isinstance(min, int) and input.is_contiguous()
    _require(is_right, "clamp_min of flat int32")
    output = torch.empty_like(input)
    native.call("at_least", _KIND, (input.numel(), min), input, output)
    return output


def _all(native: Native, input: Tensor) -> Tensor:
    _require(input.dtype is torch.bool and input.is_contiguous(), "all of flat truth values")
    output = input.new_empty(())
    native.call("all", _KIND, (input.numel(),), input, output)
    return output


def _new_zeros(native: Native, like: Tensor, size: Sequence[int], **options: Any) -> Tensor:  # noqa: ANN401  torch's options
    output = like.new_empty(size, dtype=options.get("dtype") or like.dtype)
    native.call("clear", _KIND, (output.nbytes,), output)
    return output


def _zeros_like(native: Native, input: Tensor, **options: Any) -> Tensor:  # noqa: ANN401  torch's options
    return _new_zeros(native, input, input.shape, **options)
