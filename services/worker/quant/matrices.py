"""The tensors that a quantized matrix is stored as, by the ends of their names."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.quant import int4
from services.worker.quant.input_range import InputRange
from services.worker.quant.rounding import relative_error, round_int4, round_int8
from services.worker.quant.scheme import Scheme

_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatrix:
    """One matrix [out, in] as it is written."""

    tensors: dict[str, Tensor]
    """End of the name -> tensor."""
    error: float
    """What rounding took away, as a share of the weights' size."""


def quantize_dynamic(weight: Tensor) -> QuantizedMatrix:
    """W8A8_DYNAMIC."""
    levels, scales = round_int8(weight)
    return QuantizedMatrix(
        tensors={
            "weight": levels,
            "weight_scale": scales,
            "weight_offset": torch.zeros_like(scales),
        },
        error=relative_error(weight, levels, scales),
    )


def quantize_static(weight: Tensor, inputs: InputRange) -> QuantizedMatrix:
    """W8A8: the zero point's share of each sum is known beforehand and lies in `quant_bias`."""
    levels, scales = round_int8(weight)
    sums = levels.sum(1, dtype=torch.int64)
    bias = -inputs.zero_point * sums
    assert int(bias.abs().max()) <= _INT32_MAX
    return QuantizedMatrix(
        tensors={
            "weight": levels,
            "input_scale": torch.tensor([inputs.scale]),
            "input_offset": torch.tensor([float(inputs.zero_point)]),
            "deq_scale": (scales * inputs.scale).flatten(),
            "quant_bias": bias.to(torch.int32),
        },
        error=relative_error(weight, levels, scales),
    )


def quantize_int4(weight: Tensor, moments: Tensor | None, *, is_down: bool) -> QuantizedMatrix:
    """W4A8_DYNAMIC, two weights to a byte.

    Args:
        weight: [out, in].
        moments: [in] mean squares of its inputs, if known.
        is_down: Whether it is a down projection.
    """
    levels, scales = round_int4(weight, moments)
    return QuantizedMatrix(
        tensors={
            "weight": int4.pack(levels),
            "weight_scale": scales,
            "weight_offset": torch.zeros_like(scales),
            "scale_bias": int4.compensation(levels, scales, is_down=is_down),
        },
        error=relative_error(weight, levels, scales),
    )


def stored_bytes(scheme: Scheme, size_out: int, size_in: int, *, is_down: bool) -> int:
    """Bytes of the tensors of a quantized matrix [out, in]."""
    weights, number = size_out * size_in, 4
    if scheme is Scheme.W8A8:
        return weights + size_out * 2 * number + 2 * number
    if scheme is Scheme.W8A8_DYNAMIC:
        return weights + size_out * 2 * number
    assert scheme is Scheme.W4A8_DYNAMIC
    columns = int4.NUM_CHUNKS if is_down else 1
    return weights // 2 + size_out * (2 + columns) * number
