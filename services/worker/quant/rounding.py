"""Weights to integer levels: ``weight ~ level * scale`` with one scale per output.

Scales are numbers that bfloat16 holds exactly: some programs keep them in that type, and a scale
that they round afterwards would be wrong for all weights of an output.
"""

import torch
from torch import Tensor

# Below this a bfloat16 scale would lose digits; such weights are zeros for all purposes.
_LEAST_SCALE = 2.0**-120
# Largest weights are cut off down to this share of the largest, in these steps. Coarser and finer
# grids were no better on glm-nano; a share under 0.45 was never chosen there.
_SHARES = tuple(step / 20 for step in range(20, 8, -1))
# A column's weight in the error has at least this share of the mean: inputs that calibration did
# not meet still count.
_LEAST_MOMENT = 1e-3
# Elements in work at once: few enough that what is computed from them stays in a core's cache.
_BLOCK_ELEMENTS = 1 << 18


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest levels in -127 to 127, where the largest of each output is 127.

    Args:
        weight: [out, in], any float type.

    Returns:
        Levels [out, in] int8 and scales [out, 1] float32.
    """
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((weight.shape[0], 1))
    for rows in _blocks(weight):
        block = weight[rows].float()
        scales[rows] = _as_scale(block.abs().amax(1, keepdim=True) / 127)
        levels[rows] = _rounded(block, scales[rows], -127, 127)
    return levels, scales


def round_int4(weight: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The levels in -8 to 7 with the least error in an output of the product.

    With seven levels a side it pays to cut off the largest weights: each output's scale is searched
    so that ``sum_k moments[k] * (weight[k] - level[k] * scale) ** 2`` is least.

    Args:
        weight: [out, in], any float type.
        moments: [in] mean squares of the inputs; None: all alike.

    Returns:
        Levels [out, in] int8 and scales [out, 1] float32.
    """
    importance = torch.ones(weight.shape[1]) if moments is None else moments.float()
    importance = importance.clamp_min(_LEAST_MOMENT * float(importance.mean()))
    levels = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty((weight.shape[0], 1))
    for rows in _blocks(weight):
        block = weight[rows].float()
        largest = block.abs().amax(1, keepdim=True)
        least = torch.full_like(largest, torch.inf)
        for share in _SHARES:
            scale = _as_scale(largest * (share / 7))
            rounded = _rounded(block, scale, -8, 7)
            error = (rounded.mul_(scale).sub_(block).square_() @ importance)[:, None]
            is_better = error < least
            least = torch.where(is_better, error, least)
            scales[rows] = torch.where(is_better, scale, scales[rows])
        levels[rows] = _rounded(block, scales[rows], -8, 7)
    return levels, scales


def relative_error(weight: Tensor, levels: Tensor, scales: Tensor) -> float:
    """Size of what rounding took away, as a share of the weights' size (Frobenius norms)."""
    lost = whole = 0.0
    for rows in _blocks(weight):
        block = weight[rows].float()
        whole += float(block.square().sum())
        lost += float((levels[rows] * scales[rows]).sub_(block).square_().sum())
    return (lost / whole) ** 0.5 if whole else 0.0


def _rounded(weight: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    """Levels, as whole numbers of the weights' own type."""
    return (weight / scales).round_().clamp_(lowest, highest)


def _as_scale(values: Tensor) -> Tensor:
    return values.clamp_min(_LEAST_SCALE).to(torch.bfloat16).float()


def _blocks(weight: Tensor) -> list[slice]:
    rows = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    return [slice(first, first + rows) for first in range(0, weight.shape[0], rows)]
