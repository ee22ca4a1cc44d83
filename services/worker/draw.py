"""Draws one token per row from scaled logits under top-k, top-p and min-p.

The token is the inverse of the distribution function at u, ids in ascending order. What is kept is
always "every token at least as likely as a threshold", so equal tokens are kept or dropped
together and nothing depends on how a sort breaks ties. Every number of a row is computed from that
row alone and in a way that only that row decides, so a draw does not depend on the batch.

Order of the filters: min-p and top-k on the whole distribution, then top-p on what they leave.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.plan import Floats, Ints
from services.worker.rowwise import largest

# The most likely tokens are looked at first, and most rows need no more: a full sort of 256 rows of
# 2,048 takes 29 ms on one core, the 8 largest 0.9 ms.
_LEVELS = (8, 128)


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
    is_sorted = (settings.top_k > 0) | (settings.top_p < 1)
    is_min_p = ~is_sorted & (settings.min_p > 0)
    tokens = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    for mask, method in (
        (~is_sorted & ~is_min_p, _draw_plain),
        (is_min_p, _draw_min_p),
        (is_sorted, _draw_sorted),
    ):
        rows = np.flatnonzero(mask)
        if len(rows) == len(probs):
            return method(probs, settings, u)
        if len(rows):
            at = torch.from_numpy(rows).to(probs.device)
            tokens[at] = method(probs[at], settings.take(rows), u[at])
    return tokens


def _draw_plain(probs: Tensor, settings: DrawSettings, u: Tensor) -> Tensor:
    return _inverse(probs, u)[:, 0]


def _draw_min_p(probs: Tensor, settings: DrawSettings, u: Tensor) -> Tensor:
    floor = _column(settings.min_p, probs.device) * probs.amax(dim=1, keepdim=True)
    return _inverse(probs * (probs >= floor), u)[:, 0]


def _draw_sorted(probs: Tensor, settings: DrawSettings, u: Tensor) -> Tensor:
    """Rows with top-k or top-p: a few candidates, more where they do not suffice, then all."""
    vocab_size = probs.shape[1]
    tokens = torch.zeros(len(probs), dtype=torch.int64, device=probs.device)
    rest = np.arange(len(probs))
    for level in _LEVELS:
        tried = rest[settings.top_k[rest] <= level]
        if level >= vocab_size or not len(tried):
            continue
        at = torch.from_numpy(tried).to(probs.device)
        values, ids = largest(probs[at] if len(tried) < len(probs) else probs, level)
        thresholds, is_closed = _thresholds(values, settings.take(tried), vocab_size)
        # In ascending order of ids, as everywhere.
        ids, places = torch.sort(ids, dim=1)
        values = values.gather(1, places)
        tokens[at] = ids.gather(1, _inverse(values * (values >= thresholds), u[at]))[:, 0]
        # The one place where the host waits for the device: which rows need more.
        rest = np.setdiff1d(rest, tried[is_closed.cpu().numpy()], assume_unique=True)
        if not len(rest):
            return tokens
    at = torch.from_numpy(rest).to(probs.device)
    wide = probs[at]
    values = torch.sort(wide, dim=1, descending=True).values
    thresholds, _ = _thresholds(values, settings.take(rest), vocab_size)
    tokens[at] = _inverse(wide * (wide >= thresholds), u[at])[:, 0]
    return tokens


def _thresholds(values: Tensor, settings: DrawSettings, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The least probability kept in each row, and whether `values` hold everything kept.

    Args:
        values: [S, N] largest probabilities of each row, descending.
        settings: Filters of the rows; every top_k is at most N.
        vocab_size: V; with N = V everything is there.

    Returns:
        [S, 1] thresholds and [S] flags.
    """
    device = values.device
    is_all = values.shape[1] == vocab_size
    has_top_k = settings.top_k > 0
    is_unfiltered = _column(~has_top_k & (settings.min_p == 0), device)
    top_p = _column(settings.top_p, device)
    kth = values.gather(1, _column(np.maximum(settings.top_k - 1, 0), device))
    floor = _column(settings.min_p, device) * values[:, :1]
    floor = torch.maximum(floor, kth * _column(has_top_k, device))
    is_left = values >= floor
    # Where all that the first filters leave lies inside `values`, its sum is known.
    is_cut = values[:, -1:] < floor
    sums = torch.cumsum(values * is_left, dim=1)
    total = torch.where(is_cut | is_all, sums[:, -1:], 1.0)
    is_kept = is_left & ((sums - values < top_p * total) | (top_p >= 1))
    is_kept[:, 0] = True
    threshold = torch.where(is_kept, values, float("inf")).amin(dim=1, keepdim=True)
    is_closed = (is_cut | is_unfiltered) & (values[:, -1:] < threshold)
    return threshold, (is_closed | is_all)[:, 0]


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
