"""Two int4 weights in a byte, and what lets a device multiply them by int8 activations.

Outputs 2r and 2r + 1 share byte r, the even one in its low half, both in two's complement. The
device takes an activation apart, ``q = 16 * high + low + 8`` with `low` in -8 to 7, and leaves the
8 out of the product: 8 times the sum of an output's weights takes that back.
"""

import torch
from torch import Tensor

from shared.errors import CheckpointError

NUM_CHUNKS = 16
"""Parts of a down projection's input that are compensated apart, for ranks that cut it."""

LOWEST, HIGHEST = -8, 7
# Eight outputs become one int32 on the way to the device.
_OUTPUTS_MULTIPLE = 8
_SHIFT = 8


def pack(levels: Tensor) -> Tensor:
    """Levels [out, in] int8, each in -8 to 7, to bytes [out / 2, in]."""
    assert levels.dtype is torch.int8
    assert levels.shape[0] % 2 == 0
    return (levels[0::2] & 0x0F) | (levels[1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [out / 2, in] int8 to levels [out, in] int8."""
    assert packed.dtype is torch.int8
    # Shifts of int8 keep the sign, so a half that is moved to the top comes back signed.
    even, odd = (packed << 4) >> 4, packed >> 4
    return torch.stack((even, odd), dim=1).flatten(0, 1)


def compensation(levels: Tensor, scales: Tensor, *, is_down: bool) -> Tensor:
    """8 times the weights' sums: float32 [out, 1], or [out, 16] by parts of the input.

    Args:
        levels: [out, in] int8.
        scales: [out, 1] float32.
        is_down: Whether it is a down projection, whose input ranks may cut.
    """
    num_chunks = NUM_CHUNKS if is_down else 1
    chunks = levels.view(levels.shape[0], num_chunks, -1)
    sums = chunks.sum(2, dtype=torch.int32).float()
    return _SHIFT * sums * scales


def check_sizes(name: str, size_out: int, size_in: int, *, is_down: bool) -> None:
    """Refuse a matrix that cannot be packed.

    Raises:
        CheckpointError: A size is no multiple of what the layout needs.
    """
    if size_out % _OUTPUTS_MULTIPLE:
        raise CheckpointError(
            f"{name}: has {size_out} outputs, int4 weights need a multiple of {_OUTPUTS_MULTIPLE}"
        )
    if is_down and size_in % NUM_CHUNKS:
        raise CheckpointError(
            f"{name}: has {size_in} inputs, an int4 down projection needs a multiple of "
            f"{NUM_CHUNKS}"
        )
