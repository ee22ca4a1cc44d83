"""Products with an int8 matrix: activations are quantized on the way in.

`finish_loading` brings the weight into the device's blocked layout (NZ), which no view of it may
be taken from afterwards.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from services.worker.model.shards import Shards
from services.worker.model.slots import (
    WeightSlot,
    column_slot,
    ignored_slots,
    matrix_slot,
    scale_slot,
    vector_slot,
)
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

INT8 = frozenset({"I8"})
_INT32 = frozenset({"I32"})
_FRACTAL_NZ = 29  # torch_npu's number of the blocked layout


def to_blocked_layout(weight: Tensor, spec: ModelSpec) -> Tensor:
    """A quantized weight in the layout its kernels read best; the one place that changes it."""
    if spec.weight_nz_mode == 0:
        return weight
    blocked: Tensor = torch.ops.npu.npu_format_cast(weight, _FRACTAL_NZ)
    return blocked


def zero_offset_slot(name: str, rows: int) -> WeightSlot:
    """A weight's zero points [out, 1]: served only where all are zero, and then not needed."""

    def store(source: Tensor) -> None:
        if bool(source.any()):
            raise CheckpointError(f"{name}: weights with a zero point are not served")

    return WeightSlot(name=name, shape=(rows, 1), store=store, is_required=False)


class DynamicInt8Linear:
    """W8A8_DYNAMIC: ``(q @ weight) * weight_scale * s`` with a row's own scale `s`."""

    def __init__(self, spec: ModelSpec, shards: Shards) -> None:
        self._spec = spec
        self._shards = shards
        shape = (shards.size_in, shards.size_out)
        self.weight = torch.empty(shape, dtype=torch.int8, device=spec.device)
        # float32 as in the file: vLLM-Ascend rounds scales to the model's type.
        self.weight_scale = torch.empty(shape[1:], dtype=torch.float32, device=spec.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [T, in]."""
        quantized, scales = torch.ops.npu.npu_dynamic_quant(x)
        return self.multiply(quantized, scales)

    def multiply(self, quantized: Tensor, scales: Tensor) -> Tensor:
        """Multiply rows that are quantized already, int8 [T, in] with scales [T]."""
        product: Tensor = torch.ops.npu.npu_quant_matmul(
            quantized,
            self.weight,
            self.weight_scale,
            pertoken_scale=scales,
            output_dtype=self._spec.dtype,
        )
        return product

    def slots(self) -> Iterator[WeightSlot]:
        """Weight and scale of each part; offsets must be zero."""
        for name, part in self._shards.named():
            target = self.weight[:, part.target].t()
            yield matrix_slot(f"{name}weight", target, part, types=INT8)
            yield scale_slot(
                column_slot(f"{name}weight_scale", self.weight_scale[part.target], part)
            )
            yield zero_offset_slot(f"{name}weight_offset", part.size_out)

    def finish_loading(self) -> None:
        """Change the weight's layout."""
        self.weight = to_blocked_layout(self.weight, self._spec)


class StaticInt8Linear:
    """W8A8: ``(q @ weight + quant_bias) * deq_scale`` with one scale and zero point for all rows.

    The zero point's share of the sum, and a bias, lie in `quant_bias`; in a sum over ranks one of
    them adds it.
    """

    def __init__(self, spec: ModelSpec, shards: Shards) -> None:
        self._spec = spec
        self._shards = shards
        device, (inner, outer) = spec.device, (shards.size_in, shards.size_out)
        self.weight = torch.empty((inner, outer), dtype=torch.int8, device=device)
        self.deq_scale = torch.empty(outer, dtype=torch.float32, device=device)
        self.quant_bias = torch.zeros(outer, dtype=torch.int32, device=device)
        # One for all inputs, in the type of what it multiplies: the device takes no other.
        self.input_scale_reciprocal = torch.empty(1, dtype=spec.dtype, device=device)
        self.input_offset = torch.empty(1, dtype=spec.dtype, device=device)
        self._input_scales: dict[str, float] = {}
        self._input_offsets: dict[str, float] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply `x` [T, in]."""
        quantized = torch.ops.npu.npu_quantize(
            x, self.input_scale_reciprocal, self.input_offset, torch.qint8, -1, False
        )
        product: Tensor = torch.ops.npu.npu_quant_matmul(
            quantized,
            self.weight,
            self.deq_scale,
            bias=self.quant_bias,
            output_dtype=self._spec.dtype,
        )
        return product

    def slots(self) -> Iterator[WeightSlot]:
        """Weight, scales and bias of each part; the parts share one scale of their input."""
        for name, part in self._shards.named():
            target = self.weight[:, part.target].t()
            yield matrix_slot(f"{name}weight", target, part, types=INT8)
            yield scale_slot(vector_slot(f"{name}deq_scale", self.deq_scale[part.target], part))
            if self._shards.adds_bias:
                bias = self.quant_bias[part.target]
                yield vector_slot(f"{name}quant_bias", bias, part, types=_INT32)
            else:
                yield from ignored_slots({f"{name}quant_bias": (part.size_out,)}, _INT32)
            yield scale_slot(_number_slot(f"{name}input_scale", self._input_scales))
            yield _offset_slot(f"{name}input_offset", self._input_offsets)
            column = (part.size_out, 1)
            yield from ignored_slots(
                {f"{name}weight_scale": column, f"{name}weight_offset": column}
            )

    def finish_loading(self) -> None:
        """Set the input's scale and change the weight's layout."""
        if not self.weight.is_meta:  # where nothing is stored
            self._set_input_scale()
        self.weight = to_blocked_layout(self.weight, self._spec)

    def _set_input_scale(self) -> None:
        scale = _agreed(self._input_scales)
        self.input_scale_reciprocal.fill_(1.0 / scale)
        self.input_offset.fill_(_agreed(self._input_offsets))
        # In bfloat16 the reciprocal is off by up to 2^-9; the results' scales make up for it.
        self.deq_scale.div_(scale * float(self.input_scale_reciprocal))


def _number_slot(name: str, numbers: dict[str, float]) -> WeightSlot:
    """One number for all inputs [1]."""

    def store(source: Tensor) -> None:
        numbers[name] = float(source)

    return WeightSlot(name=name, shape=(1,), store=store)


def _offset_slot(name: str, numbers: dict[str, float]) -> WeightSlot:
    """The zero point of all inputs [1], a whole number of the int8 range."""
    number = _number_slot(name, numbers)

    def store(source: Tensor) -> None:
        offset = float(source)
        if not (offset.is_integer() and -128 <= offset <= 127):
            raise CheckpointError(f"{name}: {offset} must be a whole number from -128 to 127")
        number.store(source)

    return replace(number, store=store)


def _agreed(numbers: dict[str, float]) -> float:
    """The one value of all parts: they quantize the same input once."""
    values = set(numbers.values())
    if len(values) > 1:
        listed = ", ".join(f"{name} is {value}" for name, value in numbers.items())
        raise CheckpointError(f"layers with one input must quantize it alike: {listed}")
    return values.pop()
