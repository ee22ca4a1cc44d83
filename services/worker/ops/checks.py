"""Refusals shared by the CPU kernels: what an NPU kernel would refuse, ours refuses too."""

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32)
"""Element types of the CPU kernels; float32 exists on CPU alone, for tests of exactness."""


def require(holds: bool, operator: str, reason: str) -> None:
    """Raise for an argument outside the operator's contract."""
    if not holds:
        raise ValueError(f"{operator}: {reason}")


def require_same_float(operator: str, *tensors: Tensor) -> None:
    """All tensors share one supported element type."""
    dtypes = {tensor.dtype for tensor in tensors}
    require(
        len(dtypes) == 1 and dtypes <= set(FLOATS), operator, f"dtypes {dtypes} must be one float"
    )


def require_contiguous(operator: str, *tensors: Tensor) -> None:
    """The NPU kernels read flat memory; a view would be read wrongly."""
    for tensor in tensors:
        require(tensor.is_contiguous(), operator, f"input {tuple(tensor.shape)} is not contiguous")
