"""What turns floating rows into int8 ones, and weights into the layout of their products.

Rows may lie apart, as in a slice of a fused projection.
"""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.worker.ops import nz
from services.worker.ops.checks import FLOATS, require, require_contiguous, require_same_float
from services.worker.ops.native import Native, failure
from services.worker.ops.row_quant import quantize_rows
from services.worker.ops.scalar_types import to_dtype

_DYNAMIC = "npu_dynamic_quant"
_STATIC = "npu_quantize"
_CAST = "npu_format_cast"

_DYNAMIC_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {"quant_mode": "pertoken", "dst_type_max": 0.0}
)
_INT8 = 1
_FP8 = torch.float8_e4m3fn
_LARGEST_FP8 = 448.0


def dynamic_quant(
    input: Tensor, *, dst_type: int | None = None, **unused: object
) -> tuple[Tensor, Tensor]:
    """Quantize each row by its largest value.

    Args:
        input: [..., E], two dimensions or more.
        dst_type: None or int8's number; float8_e4m3fn's as later devices know it.
        **unused: Smoothing factors, groups and modes; any that is set is refused.

    Returns:
        Rows in the asked type, and float32 scales [...].
    """
    if _check_dynamic(input, dst_type, unused) is torch.int8:
        return quantize_rows(input)
    values = input.float()
    scales = values.abs().amax(-1, keepdim=True) / _LARGEST_FP8
    levels = torch.where(scales > 0, values / scales, 0.0).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return levels.to(_FP8), scales.squeeze(-1)


def _native_dynamic_quant(
    native: Native,
    eight: Tensor,
    wide: Tensor,
    input: Tensor,
    *,
    dst_type: int | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    run = native.function("dynamic_quant", input.dtype)
    if run is None or dst_type is not None or unused or input.dim() != 2 or input.stride(1) != 1:
        return _general_dynamic_quant(native, input, dst_type, unused)
    # The usual call, before every product of a decode step: nothing more to check.
    count, width = input.shape
    quantized, scales = eight.new_empty(count, width), wide.new_empty(count)
    status = run(
        count, width, input.stride(0), input.data_ptr(), quantized.data_ptr(), scales.data_ptr()
    )
    if status:
        raise failure("dynamic_quant", status)
    return quantized, scales


def _general_dynamic_quant(
    native: Native, input: Tensor, dst_type: int | None, unused: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    if _check_dynamic(input, dst_type, unused) is not torch.int8:
        return dynamic_quant(input, dst_type=dst_type)
    rows = _as_rows(input)
    count, width = rows.shape
    quantized = torch.empty(count, width, dtype=torch.int8)
    scales = torch.empty(count, dtype=torch.float32)
    native.call(
        "dynamic_quant", input.dtype, (count, width, rows.stride(0)), rows, quantized, scales
    )
    return quantized.view(input.shape), scales.view(input.shape[:-1])


def _as_rows(input: Tensor) -> Tensor:
    """[..., E] as [rows, E] whose rows are flat but may lie apart."""
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check_dynamic(
    input: Tensor, dst_type: int | None, unused: Mapping[str, object]
) -> torch.dtype:
    require(input.dtype in FLOATS, _DYNAMIC, "input must be bfloat16 or float32, not {}",
            input.dtype)  # fmt: skip
    require(input.dim() > 1, _DYNAMIC, "input must have two dimensions or more")
    for argument, value in unused.items():
        is_default = value is None or _DYNAMIC_DEFAULTS.get(argument) == value
        require(is_default, _DYNAMIC, "{} is not supported on CPU", argument)
    if dst_type is None or dst_type == _INT8:
        return torch.int8
    asked = to_dtype(dst_type)
    is_known = asked is torch.int8 or asked is _FP8
    require(is_known, _DYNAMIC, "dst_type {} must be int8 or float8_e4m3fn", dst_type)
    assert asked is not None
    return asked


def quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """``round(input * scales + zero_points)``, half to even, within int8.

    Args:
        input: [..., E].
        scales: [E] or [1], of the type of `input`; factors, as `div_mode` says.
        zero_points: Like `scales`; None for zeros.
        dtype: qint8's number only; the result is int8.
        axis: The last one.
        div_mode: False only.
    """
    _check_static(input, scales, zero_points, dtype, axis, div_mode)
    levels = input.float() * scales.float()
    if zero_points is not None:
        levels = levels + zero_points.float()
    return levels.clamp(-128, 127).nan_to_num(-128).round().to(torch.int8)


def _native_quantize(
    native: Native,
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    _check_static(input, scales, zero_points, dtype, axis, div_mode)
    shifts = torch.zeros_like(scales) if zero_points is None else zero_points
    rows = _as_rows(input)
    count, width = rows.shape
    quantized = torch.empty(count, width, dtype=torch.int8)
    numbers = (count, width, rows.stride(0), scales.numel() == 1)
    native.call("quantize", input.dtype, numbers, rows, scales, shifts, quantized)
    return quantized if input.dim() == 2 else quantized.view(input.shape)


def _check_static(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: object,
    axis: int,
    div_mode: bool,
) -> None:
    shifts = scales if zero_points is None else zero_points
    require_same_float(_STATIC, input, scales, shifts)
    require_contiguous(_STATIC, scales, shifts)
    is_right = scales.shape == input.shape[-1:] or scales.shape == (1,)
    require(is_right, _STATIC, "scales {} must be [E] or [1]", scales.shape)
    require(shifts.shape == scales.shape, _STATIC, "zero_points {} must be like scales",
            shifts.shape)  # fmt: skip
    require(to_dtype(dtype) is torch.qint8, _STATIC, "dtype {} must be qint8", dtype)
    require(axis in {-1, input.dim() - 1}, _STATIC, "axis {} must be the last", axis)
    require(not div_mode, _STATIC, "div_mode must be False")


def format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """Bring a weight [..., K, N] into another layout.

    int8 and int32 (packed int4) weights are packed for our kernels. Weights of floating types stay
    as they are: there is no other layout of theirs on a CPU.

    Args:
        input: The weight.
        acl_format: 29 for the blocked layout, 2 for the plain one.
        customize_dtype: None only.
        input_dtype: None only.
    """
    if _needs_packing(input, acl_format, customize_dtype, input_dtype):
        return nz.pack(input)
    return nz.unpack(input) if acl_format == nz.ND and nz.is_nz(input) else input


def _native_format_cast(
    native: Native,
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    if not _needs_packing(input, acl_format, customize_dtype, input_dtype):
        return format_cast(input, acl_format)
    numbers = nz.sizes(input)
    memory = nz.allocate(input)
    packed = nz.payload(memory, numbers[-1])
    native.call("pack_weights", torch.float32, numbers, input.contiguous(), packed)
    return nz.seal(memory, input)


def _needs_packing(
    input: Tensor, acl_format: int, customize_dtype: int | None, input_dtype: int | None
) -> bool:
    is_right = customize_dtype is None and input_dtype is None
    require(is_right, _CAST, "other types than the input's are not supported on CPU")
    require(acl_format in {nz.FRACTAL_NZ, nz.ND}, _CAST, "format {} must be 29 or 2", acl_format)
    require(input.dim() > 1, _CAST, "input must be [..., K, N]")
    is_integer = input.dtype is torch.int8 or input.dtype is torch.int32
    return acl_format == nz.FRACTAL_NZ and is_integer and not nz.is_nz(input)


def _results() -> tuple[Tensor, Tensor]:
    """Tensors to make others of the same type from, which is quicker than naming the type."""
    return torch.empty(0, dtype=torch.int8), torch.empty(0)


def kernels(native: Native | None) -> dict[str, Callable[..., object]]:
    """Kernels of this family."""
    if native is None:
        return {
            _DYNAMIC: dynamic_quant,
            _STATIC: quantize,
            _CAST: format_cast,
        }
    return {
        _DYNAMIC: functools.partial(_native_dynamic_quant, native, *_results()),
        _STATIC: functools.partial(_native_quantize, native),
        _CAST: functools.partial(_native_format_cast, native),
    }
