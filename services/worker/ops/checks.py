"""Refusals shared by the CPU kernels: what an NPU kernel would refuse, ours refuses too.

A decode step makes a hundred calls, so a check that holds costs a comparison and nothing else: the
text of a refusal is put together only when it is needed.
"""

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
"""Element types of the CPU kernels; float32 exists on CPU alone, for tests of exactness."""


def require(holds: bool, operator: str, reason: str, value: object = None) -> None:
    """Raise for an argument outside the operator's contract; `value` fills ``{}`` in `reason`."""
    if not holds:
        raise ValueError(f"{operator}: {reason.format(value)}")


def require_same_float(operator: str, *tensors: Tensor) -> None:
    """All tensors share one supported element type."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype or dtype not in FLOATS:
            found = sorted({str(other.dtype) for other in tensors})
            raise ValueError(f"{operator}: types {found} must be one of bfloat16, float32")


def require_int32(operator: str, *tensors: Tensor) -> None:
    """Lengths, tables and positions are int32 and flat, as the device reads them."""
    for tensor in tensors:
        if tensor.dtype is not torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{operator}: {tensor.dtype} input {tuple(tensor.shape)} must be flat int32"
            )


def require_step(operator: str, ends: Tensor, lens: Tensor, block_table: Tensor) -> None:
    """One entry and one row per sequence."""
    require_int32(operator, ends, lens, block_table)
    if not ends.shape == lens.shape == block_table.shape[:1]:
        raise ValueError(
            f"{operator}: {ends.shape[0]} ends, {lens.shape[0]} lengths and "
            f"{block_table.shape[0]} table rows must be one per sequence"
        )


def require_contiguous(operator: str, *tensors: Tensor) -> None:
    """The NPU kernels read flat memory; a view would be read wrongly."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"{operator}: input {tuple(tensor.shape)} is not contiguous")
