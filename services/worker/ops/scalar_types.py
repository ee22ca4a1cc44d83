"""Element types as operators receive them: the dispatcher passes torch's own number for a type."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

_BY_NUMBER: Mapping[int, torch.dtype] = MappingProxyType(
    {
        1: torch.int8,
        3: torch.int32,
        5: torch.float16,
        6: torch.float32,
        12: torch.qint8,
        15: torch.bfloat16,
        24: torch.float8_e4m3fn,
    }
)


def to_dtype(value: object) -> torch.dtype | None:
    """The type meant by an argument; None for none, and for one that no operator here gives."""
    if isinstance(value, torch.dtype):
        return value
    return _BY_NUMBER.get(value) if isinstance(value, int) else None
