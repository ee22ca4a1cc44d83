"""The element types of safetensors files, by their names in the header."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True)
class StoredType:
    """One element type as it lies in a file, little endian."""

    dtype: torch.dtype
    num_bytes: int
    is_float: bool = False


STORED_TYPES: Mapping[str, StoredType] = MappingProxyType(
    {
        "BOOL": StoredType(torch.bool, 1),
        "U8": StoredType(torch.uint8, 1),
        "I8": StoredType(torch.int8, 1),
        "F8_E4M3": StoredType(torch.float8_e4m3fn, 1, is_float=True),
        "F8_E5M2": StoredType(torch.float8_e5m2, 1, is_float=True),
        "F8_E8M0": StoredType(torch.float8_e8m0fnu, 1, is_float=True),
        "U16": StoredType(torch.uint16, 2),
        "I16": StoredType(torch.int16, 2),
        "F16": StoredType(torch.float16, 2, is_float=True),
        "BF16": StoredType(torch.bfloat16, 2, is_float=True),
        "U32": StoredType(torch.uint32, 4),
        "I32": StoredType(torch.int32, 4),
        "F32": StoredType(torch.float32, 4, is_float=True),
        "U64": StoredType(torch.uint64, 8),
        "I64": StoredType(torch.int64, 8),
        "F64": StoredType(torch.float64, 8, is_float=True),
        "C64": StoredType(torch.complex64, 8, is_float=True),
    }
)
