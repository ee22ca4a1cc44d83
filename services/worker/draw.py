"""Draws one token per row from scaled logits under top-k, top-p and min-p.

The token is the inverse of the distribution function at u, ids in ascending order. What is kept is
always "every token at least as likely as a threshold", so equal tokens are kept or dropped
together and nothing depends on how a sort breaks ties. Every number of a row is computed from that
row alone, in the same order of operations in any batch.

Order of the filters: min-p and top-k on the whole distribution, then top-p on what they leave.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.plan import Floats, Ints
from services.worker.rowwise import candidates, kth_bound, sort_descending

# Lowers a bound by more than any rounding, so that nothing is left out that should be kept.
_SLACK = 1 - 1e-4
# Rows with more candidates than this are worked on apart: one of them widens a whole batch.
_FEW = 256
# top-p first looks at tokens with at least this share of the mass that it drops: few of a peaked
# row, and all that is kept if together they have the mass that it keeps.
_SHARE = 64
_MASS_SLACK = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawSettings:
    """Filters of S rows, on the host, one entry each; top_k 0, top_p 1 and min_p 0 are off."""

    top_k: Ints
    top_p: Floats
    min_p: Floats

    def take(self, index: Ints) -> "DrawSettings":
        """The settings of some rows."""
        return DrawSettings(
            top_k=self.top_k[index], top_p=self.top_p[index], min_p=self.min_p[index]
        )


def draw(logits: Tensor, settings: DrawSettings, u: Tensor) -> Tensor:
    """[S, V] logits divided by temperature and u [S] in [0, 1) -> [S] token ids."""
    probs = torch.softmax(logits, dim=1)
    is_narrow = settings.top_k < probs.shape[1]
    settings = replace(settings, top_k=np.where(is_narrow, settings.top_k, 0))
    is_filtered = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
    filtered = is_filtered.nonzero()[0]
    if not len(filtered):
        return _inverse(probs, u)[:, 0]
    if len(filtered) == len(probs):
        return _draw_filtered(probs, settings, u)
    tokens = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    for rows, is_plain in (((~is_filtered).nonzero()[0], True), (filtered, False)):
        at = torch.from_numpy(rows).to(probs.device)
        if is_plain:
            tokens[at] = _inverse(probs[at], u[at])[:, 0]
        else:
            tokens[at] = _draw_filtered(probs[at], settings.take(rows), u[at])
    return tokens


def _draw_filtered(probs: Tensor, settings: DrawSettings, u: Tensor) -> Tensor:
    if probs.device.type != "cpu":
        # A device sorts whole rows faster than it waits for the host to learn a size.
        return _inverse(probs * (probs >= _thresholds(probs, settings)), u)[:, 0]
    tokens = torch.zeros(len(probs), dtype=torch.int64)
    found = candidates(probs, _bounds(probs, settings), _FEW)
    is_top_p_alone = (settings.top_k == 0) & (settings.min_p == 0)
    is_enough = ~is_top_p_alone[found.rows] | (
        found.masses >= settings.top_p[found.rows] + _MASS_SLACK
    )
    good = is_enough.nonzero()[0]
    if len(good):
        rows, here = torch.from_numpy(found.rows[good]), torch.from_numpy(good)
        values = found.values[here]
        weights = values * (values >= _thresholds(values, settings.take(found.rows[good])))
        tokens[rows] = found.ids[here].gather(1, _inverse(weights, u[rows]))[:, 0]
    if len(good) < len(probs):
        left = np.setdiff1d(np.arange(len(probs)), found.rows[good], assume_unique=True)
        rows = torch.from_numpy(left)
        wide = probs[rows]
        weights = wide * (wide >= _thresholds(wide, settings.take(left)))
        tokens[rows] = _inverse(weights, u[rows])[:, 0]
    return tokens


def _bounds(probs: Tensor, settings: DrawSettings) -> Floats:
    """[S] probabilities: no token below is kept; for top-p alone, none is likely to be kept."""
    bounds = (1 - settings.top_p) / _SHARE
    has_top_k = settings.top_k > 0
    has_min_p = settings.min_p > 0
    # top-p counts shares of what the other filters leave: its own bound does not hold then.
    bounds[has_top_k | has_min_p] = 0
    if has_min_p.any():
        bounds = np.maximum(bounds, settings.min_p * probs.numpy().max(axis=1))
    if has_top_k.any():
        bounds = np.where(has_top_k, np.maximum(bounds, kth_bound(probs, settings.top_k)), bounds)
    return (bounds * _SLACK).astype(np.float32)


def _thresholds(probs: Tensor, settings: DrawSettings) -> Tensor:
    """[S, N] probabilities, zeros among them or not -> [S, 1] least probability kept."""
    device = probs.device
    values = sort_descending(probs)
    has_top_k = settings.top_k > 0
    top_p = _column(settings.top_p, device)
    # Fewer candidates than top_k: the last one bounds nothing.
    last = np.clip(settings.top_k - 1, 0, values.shape[1] - 1)
    kth = values.gather(1, _column(last, device))
    floor = _column(settings.min_p, device) * values[:, :1]
    floor = torch.maximum(floor, kth * _column(has_top_k, device))
    is_left = values >= floor
    sums = torch.cumsum(values * is_left, dim=1)
    is_unfiltered = _column(~has_top_k & (settings.min_p == 0), device)
    total = torch.where(is_unfiltered, 1.0, sums[:, -1:])
    is_kept = is_left & ((sums - values < top_p * total) | (top_p >= 1))
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


def _column(entries: "Ints | Floats | NDArray[np.bool_]", device: torch.device) -> Tensor:
    return torch.from_numpy(entries).to(device)[:, None]
