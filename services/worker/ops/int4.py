"""Weights of four bits, and their scales, in the form that the device's products take them.

A byte holds two outputs of one input, the even one in its low half; an int32 holds eight, the
first one lowest. An NPU's blocked layout is made from the bytes: from int32 elements it would come
out with blocks of another width. So the order is: bytes [..., K, N / 2], the cast to the blocked
layout if wanted, then `as_int4`.
"""

import torch
from torch import Tensor

from services.worker.ops import nz


def as_int4(pairs: Tensor) -> Tensor:
    """The same weights as int32 [..., K, N / 8].

    A view, except of a weight that is packed for our CPU kernels: these pack four bits otherwise
    than eight.
    """
    if not nz.is_nz(pairs):
        return pairs.view(torch.int32)
    packed: Tensor = torch.ops.npu.npu_format_cast(
        nz.unpack(pairs).view(torch.int32), nz.FRACTAL_NZ
    )
    return packed


def scale_bits(scales: Tensor) -> Tensor:
    """float32 scales as the int64 that the device reads: their bits, the upper half zero."""
    bits = scales.to(torch.float32).contiguous().view(torch.int32)
    return bits.to(torch.int64) & 0xFFFFFFFF


def scale_values(bits: Tensor) -> Tensor:
    """float32 scales from their bits."""
    return bits.to(torch.int32).view(torch.float32)
