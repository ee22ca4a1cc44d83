"""Draws one token per row under temperature, top-k, top-p and min-p.

The token is the inverse of the distribution function at u, ids in ascending order. What is kept is
always "every token at least as likely as a threshold", so equal tokens are kept or dropped
together and nothing depends on how a sort breaks ties. Every number of a row is computed from that
row alone, in the same order of operations in any batch.

Order of the filters: min-p and top-k on the whole distribution, then top-p on what they leave.

There are two ways by the same law: plain tensor operations for any device, and a compiled kernel
for the CPU, which takes a tenth of their time (csrc/draw.c).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.ops import native
from services.worker.plan import Floats, Ints
from services.worker.uniform import uniform


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawSettings:
    """How S rows draw, on the host, one entry each; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats
    seeds: Ints
    positions: Ints
    """Output tokens that each row has so far."""


def draw(logits: Tensor, places: Ints, settings: DrawSettings) -> Tensor:
    """Draw for the rows `places` [S] of `logits` [N, V] -> [S] token ids."""
    library = native.load()
    if library is None or logits.device.type != "cpu":
        return draw_by_tensors(logits, places, settings)
    return draw_by_kernel(library, logits, places, settings)


def draw_by_kernel(
    library: native.Native, logits: Tensor, places: Ints, settings: DrawSettings
) -> Tensor:
    """The compiled kernel; for float32 logits on the CPU whose rows are contiguous."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tokens = torch.empty(len(places), dtype=torch.int64)
    columns = (
        (places, np.int64),
        (settings.temperature, np.float32),
        (settings.top_k, np.int64),
        (settings.top_p, np.float32),
        (settings.min_p, np.float32),
        (settings.seeds, np.int64),
        (settings.positions, np.int64),
    )
    arrays = [np.ascontiguousarray(column, dtype) for column, dtype in columns]
    numbers = (len(places), logits.shape[1], logits.stride(0))
    tensors = [torch.from_numpy(array) for array in arrays]
    library.call("draw", torch.float32, numbers, logits, *tensors, tokens)
    return tokens


def draw_by_tensors(logits: Tensor, places: Ints, settings: DrawSettings) -> Tensor:
    """Tensor operations, on the device of the logits."""
    device = logits.device
    rows = logits[torch.from_numpy(places).to(device)]
    probs = torch.softmax(rows / _column(settings.temperature, device), dim=1)
    u = uniform(
        torch.from_numpy(settings.seeds).to(device), torch.from_numpy(settings.positions).to(device)
    )
    is_filtered = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
    if is_filtered.any():
        probs = probs * (probs >= _thresholds(probs, settings))
    return _inverse(probs, u)[:, 0]


def _thresholds(probs: Tensor, settings: DrawSettings) -> Tensor:
    """[S, V] probabilities -> [S, 1] least probability kept."""
    device, vocab_size = probs.device, probs.shape[1]
    values = torch.sort(probs, dim=1, descending=True).values
    has_top_k = (settings.top_k > 0) & (settings.top_k < vocab_size)
    top_p = _column(settings.top_p, device)
    kth = values.gather(1, _column(np.clip(settings.top_k - 1, 0, vocab_size - 1), device))
    floor = _column(settings.min_p, device) * values[:, :1]
    floor = torch.maximum(floor, kth * _column(has_top_k, device))
    is_left = values >= floor
    sums = torch.cumsum(values * is_left, dim=1)
    is_kept = is_left & ((sums - values < top_p * sums[:, -1:]) | (top_p >= 1))
    is_kept[:, 0] = True
    return torch.where(is_kept, values, float("inf")).amin(dim=1, keepdim=True)


def _inverse(weights: Tensor, u: Tensor) -> Tensor:
    """[S, N] weights -> [S, 1] first place whose running sum exceeds u times the sum."""
    sums = torch.cumsum(weights, dim=1)
    total = sums[:, -1:]
    # Below the total even after rounding, so that the place exists and has weight.
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True)
    return place.clamp(max=weights.shape[1] - 1)  # only rows of NaN come out above


def _column(entries: "np.ndarray", device: torch.device) -> Tensor:
    return torch.from_numpy(entries).to(device)[:, None]
