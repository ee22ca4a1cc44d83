"""Quantization of rows to int8, each with a scale of its own; ``csrc/quantize.h`` in torch."""

import torch
from torch import Tensor

_LARGEST = 127.0


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``round(x / scale)``, half to even, with the scale that makes a row's largest value 127.

    Args:
        x: [..., E] of any floating type.

    Returns:
        int8 like `x`, and float32 scales [...]. A row of zeros has scale 0; a row with a NaN or an
        infinity is zeros under a scale that says so.
    """
    values = x.float()
    scales = values.abs().amax(-1, keepdim=True) / _LARGEST
    is_usable = (scales > 0) & (scales < float("inf"))
    levels = torch.where(is_usable, values / scales, 0.0).round()
    return levels.to(torch.int8), scales.squeeze(-1)
