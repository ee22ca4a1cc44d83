"""Applies masks to logits: what a mask does not have becomes impossible."""

import numpy as np
import torch
from torch import Tensor

from services.worker.ops import native
from services.worker.plan import Ints


def allow_only(logits: Tensor, places: Ints, words: Tensor) -> None:
    """Change rows of `logits` in place.

    Args:
        logits: [S, V] float32; rows are contiguous.
        places: [C] rows, distinct.
        words: [C, W] int32 on the host, 32 ids per word; ids behind them are impossible.
    """
    num_rows, width = logits.shape
    assert words.shape[0] == len(places)
    assert logits.stride(1) == 1
    library = native.load() if logits.device.type == "cpu" else None
    if library is not None:
        at = torch.from_numpy(np.ascontiguousarray(places))
        assert len(at) == 0 or 0 <= int(at.min()) <= int(at.max()) < num_rows
        words = words.contiguous()
        numbers = (len(at), width, logits.stride(0), words.shape[1])
        library.call("allow_only", torch.float32, numbers, logits, at, words)
        return
    at = torch.from_numpy(places).to(logits.device)
    moved = words.to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    bits = (moved[:, :, None] >> shifts) & 1
    is_allowed = bits.view(len(places), -1)[:, :width].bool()
    if is_allowed.shape[1] < width:
        missing = width - is_allowed.shape[1]
        is_allowed = torch.nn.functional.pad(is_allowed, (0, missing), value=False)
    logits[at] = logits[at].masked_fill(~is_allowed, float("-inf"))
