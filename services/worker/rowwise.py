"""Row-wise searches over logits that torch does slowly on a CPU."""

import torch
from torch import Tensor

from services.worker.ops import native

_GROUP_SIZE = 16
# Below this width the detour over groups costs more than it saves.
_MIN_GROUPED_WIDTH = 8192


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[S, V] -> value and id of the largest logit in each row, [S] each.

    The lowest id among equals, and the first NaN if there is one. For 256 rows of 2,048 logits
    torch's search takes 0.46 ms on one core and the compiled one 0.05 ms.
    """
    library = native.load() if logits.device.type == "cpu" else None
    if library is None:
        ids = torch.argmax(logits, dim=1)
        return logits.gather(1, ids[:, None])[:, 0], ids
    assert logits.stride(1) == 1
    count, width = logits.shape
    ids, values = torch.empty(count, dtype=torch.int64), torch.empty(count)
    numbers = (count, width, logits.stride(0))
    library.call("largest", torch.float32, numbers, logits, values, ids)
    return values, ids


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[S, V] -> the `count` largest logits of each row, descending, and their ids, [S, count] each.

    Wide rows are searched in groups: the largest logits lie in the groups with the largest maxima.
    For 16 rows of 154,880 that takes 0.5 ms on one core in place of 3 ms.
    """
    num_rows, width = logits.shape
    num_groups = width // _GROUP_SIZE
    if width < _MIN_GROUPED_WIDTH or num_groups < 2 * count:
        return torch.topk(logits, count, dim=1)
    # Group g holds the ids g, g + num_groups, ...: the maximum over a middle axis is vectorised.
    whole = num_groups * _GROUP_SIZE
    maxima = logits[:, :whole].reshape(num_rows, _GROUP_SIZE, num_groups).amax(dim=1)
    groups = torch.topk(maxima, count, dim=1).indices
    offsets = torch.arange(0, whole, num_groups, device=logits.device)
    ids = (groups[:, :, None] + offsets).view(num_rows, -1)
    if whole < width:
        rest = torch.arange(whole, width, device=logits.device).expand(num_rows, -1)
        ids = torch.cat([ids, rest], dim=1)
    values, places = torch.topk(logits.gather(1, ids), count, dim=1)
    return values, ids.gather(1, places)
