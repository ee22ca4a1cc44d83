"""Products of int8 rows with an int8 matrix.

The sums of a product are exact and are scaled in one order, so a row's result depends on nothing
beside it, and without a float bias all versions agree to the last bit. A weight may be plain or
packed (`services.worker.ops.nz`). Rows may lie apart, as in a slice of a fused projection.

A small model's decode step spends more time on checks than on arithmetic, so the compiled version
checks a weight once with the scale and bias it is used with, and remembers that on the weight.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import require, require_contiguous
from services.worker.ops.native import Native, failure
from services.worker.ops.scalar_types import to_dtype

_NAME = "npu_quant_matmul"
_KNOWN = "known_product"
_MAX_INNER = 65535

# Flags of the compiled product, as csrc/int8.c numbers them.
_PACKED, _ONE_SCALE, _ROW_SCALES, _SUMS = 1, 2, 8, 128
_SCALE_FLAGS: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 4})
_BIAS_FLAGS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.int32: 16, torch.float32: 32, torch.bfloat16: 64}
)
_OUTPUTS = frozenset({torch.bfloat16, torch.float32, torch.int32})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A checked weight with what every call multiplies it by."""

    scale: Tensor
    bias: Tensor | None
    output_dtype: object
    shape: tuple[int, ...]
    """Of the weight."""
    flags: int
    kernel_type: torch.dtype
    """Of the compiled function."""
    like: Tensor
    """An empty tensor of the result's type, to make the result from."""

    def is_of(self, x2: Tensor, scale: Tensor, bias: Tensor | None, output_dtype: object) -> bool:
        """Whether a weight is used as it was when it was checked."""
        return (
            self.scale is scale
            and self.bias is bias
            and self.output_dtype == output_dtype
            and self.shape == x2.shape
        )


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **unused: object,
) -> Tensor:
    """``(x1 @ x2 + int32 bias) * scale * pertoken_scale + float bias``.

    Args:
        x1: [M, K] int8.
        x2: [K, N] int8, plain or packed.
        scale: [N] or [1], float32 or bfloat16.
        pertoken_scale: [M] float32.
        bias: [N] int32, float32 or bfloat16.
        output_dtype: bfloat16 or float32 (CPU only), or int32 for the sums alone, as they are
            before any scale.
        **unused: Offsets, other types and group sizes; any that is set is refused.
    """
    product = _check_weight(x2, scale, bias, output_dtype, unused)
    _check_rows(x1, pertoken_scale, product)
    # Whole numbers far below 2^53 are exact in float64, in any order.
    sums = (x1.double() @ nz.plain(x2).double()).to(torch.int32)
    if bias is not None and bias.dtype is torch.int32:
        sums = sums + bias
    if product.flags & _SUMS:
        return sums
    values = sums.float() * scale.float()
    if pertoken_scale is not None:
        values = values * pertoken_scale[:, None]
    if bias is not None and bias.dtype is not torch.int32:
        values = values + bias.float()
    return values.to(product.like.dtype)


def _native_quant_matmul(
    native: Native,
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **unused: object,
) -> Tensor:
    product: _Product | None = getattr(x2, _KNOWN, None)
    if product is None or unused or not product.is_of(x2, scale, bias, output_dtype):
        product = _check_weight(x2, scale, bias, output_dtype, unused)
        setattr(x2, _KNOWN, product)
    _check_rows(x1, pertoken_scale, product)
    stride, step = x1.stride()
    if step != 1:
        x1 = x1.contiguous()
        stride = x1.stride(0)
    count = x1.shape[0]
    inner, outer = product.shape
    result = product.like.new_empty(count, outer)
    run = native.function("quant_matmul", product.kernel_type)
    assert run is not None
    scales = scale.data_ptr()
    status = run(
        count, inner, outer, stride,
        product.flags if pertoken_scale is None else product.flags | _ROW_SCALES,
        x1.data_ptr(), x2.data_ptr(), scales,
        scales if pertoken_scale is None else pertoken_scale.data_ptr(),
        scales if bias is None else bias.data_ptr(), result.data_ptr(),
    )  # fmt: skip
    if status:
        raise failure("quant_matmul", status)
    return result


def _check_rows(x1: Tensor, row_scales: Tensor | None, product: _Product) -> None:
    shape = x1.shape
    if x1.dtype is not torch.int8 or len(shape) != 2 or shape[1] != product.shape[0]:
        raise ValueError(
            f"{_NAME}: x1 {x1.dtype} {tuple(x1.shape)} must be int8 [M, {product.shape[0]}]"
        )
    if row_scales is None:
        return
    is_right = row_scales.dtype is torch.float32 and row_scales.is_contiguous()
    if not is_right or row_scales.shape != shape[:1]:
        raise ValueError(
            f"{_NAME}: pertoken_scale {row_scales.dtype} {tuple(row_scales.shape)} must be flat "
            f"float32 [{len(x1)}]"
        )
    require(not product.flags & _SUMS, _NAME, "sums have no pertoken_scale")


def _check_weight(
    x2: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    output_dtype: object,
    unused: Mapping[str, object],
) -> _Product:
    for argument, value in unused.items():
        require(value is None, _NAME, "{} is not supported on CPU", argument)
    output = to_dtype(output_dtype)
    if output not in _OUTPUTS:
        raise ValueError(f"{_NAME}: output_dtype {output_dtype} must be bf16, fp32 or int32")
    is_right = x2.dtype is torch.int8 and x2.dim() == 2 and 0 < x2.shape[0] <= _MAX_INNER
    require(is_right, _NAME, "x2 must be int8 [K, N], with K up to 65535")
    flags = _check_scale(scale, x2.shape[1], output)
    if bias is not None:
        flags |= _check_bias(bias, x2.shape[1], output)
    if output is torch.int32:
        flags |= _SUMS
    if nz.is_nz(x2):
        flags |= _PACKED
    else:
        require_contiguous(_NAME, x2)
    return _Product(
        scale=scale,
        bias=bias,
        output_dtype=output_dtype,
        shape=tuple(x2.shape),
        flags=flags,
        kernel_type=torch.bfloat16 if output is torch.bfloat16 else torch.float32,
        like=torch.empty(0, dtype=output),
    )


def _check_scale(scale: Tensor, columns: int, output: torch.dtype) -> int:
    flags = _SCALE_FLAGS.get(scale.dtype)
    if flags is None or not scale.is_contiguous():
        raise ValueError(f"{_NAME}: scale {scale.dtype} must be flat, float32 or bfloat16")
    is_right = flags == 0 or output is not torch.float32
    require(is_right, _NAME, "a bfloat16 scale gives bfloat16 or int32")
    if scale.shape == (columns,):
        return flags
    require(scale.shape == (1,), _NAME, "scale {} must be [N] or [1]", scale.shape)
    return flags | _ONE_SCALE


def _check_bias(bias: Tensor, columns: int, output: torch.dtype) -> int:
    flags = _BIAS_FLAGS.get(bias.dtype)
    if flags is None or bias.shape != (columns,) or not bias.is_contiguous():
        raise ValueError(
            f"{_NAME}: bias {bias.dtype} {tuple(bias.shape)} must be flat [N], "
            "int32, float32 or bfloat16"
        )
    is_right = output is not torch.int32 or bias.dtype is torch.int32
    require(is_right, _NAME, "sums have an int32 bias")
    is_right = output is torch.bfloat16 or bias.dtype is not torch.bfloat16
    require(is_right, _NAME, "a bfloat16 bias gives bfloat16")
    return flags


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {_NAME: quant_matmul}
    return {_NAME: functools.partial(_native_quant_matmul, native)}
