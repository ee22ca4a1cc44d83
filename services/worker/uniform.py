"""The only randomness of the worker: u = hash(seed, output position), a number in [0, 1).

There is no generator and no state, so the same seed gives the same text whatever else is in the
batch, however the prompt was cut, and after a preemption. Integer tensor arithmetic only: it runs
on the device and gives the same bits on every device.
"""

import torch
from torch import Tensor

# The finaliser and the increment of SplitMix64 (Steele, Lea, Flood 2014), as signed numbers.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_INCREMENT = 0x9E3779B97F4A7C15 - (1 << 64)
# float32 holds 24 bits exactly, so that 1.0 is never reached.
_BITS = 24


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """[S] int64 seeds and [S] int64 positions to [S] float32 numbers in [0, 1)."""
    # The seed is mixed first: neighbouring seeds must not give shifted copies of one stream.
    state = _mix(_mix(seeds) + (positions + 1) * _INCREMENT)
    return _shift(state, 64 - _BITS).to(torch.float32) * 2.0**-_BITS


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(state: Tensor, count: int) -> Tensor:
    """Shift right and fill with zeros; torch alone would repeat the sign."""
    return (state >> count) & ((1 << (64 - count)) - 1)
