"""The form of a tensor argument: sizes, element type, whether its memory must be flat."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.ops.nz import is_nz

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Kind:
    """Element types an argument may have."""

    name: str
    types: tuple[torch.dtype, ...]
    cpu_types: tuple[torch.dtype, ...] = ()
    """Further types that our CPU kernels take and the device does not."""
    agrees: bool = True
    """Whether a floating type must be that of the call's other arguments."""


FLOAT = Kind("bf16 or fp16", (torch.bfloat16, torch.float16), (torch.float32,))
WIDE = Kind("bf16, fp16 or fp32", (torch.bfloat16, torch.float16, torch.float32))
SCALE = Kind("fp32", (torch.float32,), agrees=False)
HALF = Kind("fp16", (torch.float16,), agrees=False)
NARROW = Kind("bf16 or fp16", (torch.bfloat16, torch.float16), agrees=False)
INT8 = Kind("int8", (torch.int8,))
FLOAT8 = Kind("fp8 (e4m3)", (torch.float8_e4m3fn,), agrees=False)
INT32 = Kind("int32", (torch.int32,))
INT64 = Kind("int64", (torch.int64,))
INDEX = Kind("int32 or int64", (torch.int32, torch.int64))


@dataclass(frozen=True, slots=True)
class Form:
    """What one tensor argument must look like."""

    shape: str
    """Sizes by letter or number, ``...`` first for any leading sizes."""
    kind: Kind = FLOAT
    is_flat: bool = False
    """Whether the kernel reads flat memory only."""

    def find_violation(self, value: object, sizes: dict[str, int], types: set[torch.dtype]) -> str:
        """What is wrong with `value`; empty when nothing is.

        Args:
            value: The argument.
            sizes: Sizes that earlier arguments of the call gave to letters; added to.
            types: Floating types of earlier arguments of the call; added to.
        """
        if not isinstance(value, Tensor):
            return f"must be one tensor [{self.shape}]"
        allowed = self.kind.types + (self.kind.cpu_types if value.device.type == "cpu" else ())
        if value.dtype not in allowed:
            return f"{value.dtype} must be {self.kind.name}"
        if value.dtype.is_floating_point and self.kind.agrees:
            types.add(value.dtype)
            if len(types) > 1:
                return f"{value.dtype} differs from another argument's type"
        if not self._fits(tuple(value.shape), sizes):
            return f"{tuple(value.shape)} must be [{self.shape}] with {sizes}"
        if self.is_flat and not (value.is_contiguous() or _is_packed(value)):
            return f"{tuple(value.shape)} is not contiguous"
        return ""

    def _fits(self, shape: tuple[int, ...], sizes: dict[str, int]) -> bool:
        letters = self.shape.split()
        if letters[0] == "...":
            letters = letters[1:]
            shape = shape[len(shape) - len(letters) :]
        if len(shape) != len(letters):
            return False
        for letter, size in zip(letters, shape, strict=True):
            expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if expected != size:
                return False
        return True


def _is_packed(value: Tensor) -> bool:
    """Whether a weight is opaque memory, which is whole by nature."""
    return value.dim() > 1 and is_nz(value)
