"""The form of a tensor argument: sizes, element type, whether its memory must be flat."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from services.worker.ops.nz import is_nz

Sizes = Mapping[str, int]

_BLOCKED_TYPES = frozenset({torch.int8, torch.int32})
"""Types of weights that are kept in blocks: int8, and int4 as eight in an int32."""


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


class Blocked(Enum):
    """What a kernel makes of a weight in the blocked layout (NZ)."""

    REFUSED = "refused"
    """It would take the blocks for rows."""
    ALLOWED = "allowed"
    REQUIRED = "required"
    """It takes any memory for blocks."""


@dataclass(frozen=True, slots=True)
class Form:
    """What one tensor argument must look like."""

    shape: str
    """Sizes by letter or number, ``...`` first for any leading sizes."""
    kind: Kind = FLOAT
    is_flat: bool = False
    """Whether the kernel reads flat memory only; blocked memory is flat by nature."""
    blocked: Blocked = Blocked.REFUSED

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
        return self._layout_violation(value)

    def _layout_violation(self, value: Tensor) -> str:
        is_blocked = value.dtype in _BLOCKED_TYPES and value.dim() > 1 and is_nz(value)
        if is_blocked and self.blocked is Blocked.REFUSED:
            return "is in the blocked layout (NZ), which would be read as plain rows"
        if not is_blocked and self.blocked is Blocked.REQUIRED:
            return "must be in the blocked layout (NZ)"
        is_flat = is_blocked or _is_ours(value) or value.is_contiguous()
        return f"{tuple(value.shape)} is not contiguous" if self.is_flat and not is_flat else ""

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


def _is_ours(value: Tensor) -> bool:
    """Whether a float weight is packed for our kernels; on the device it stays plain."""
    is_matrix = value.device.type == "cpu" and value.is_floating_point() and value.dim() > 1
    return is_matrix and is_nz(value)
