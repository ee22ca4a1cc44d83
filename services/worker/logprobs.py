"""Log-probabilities of sampled tokens and of the most likely alternatives.

They are those of the model: log-softmax of the raw logits over the ids of the tokenizer, before
bias, penalties, temperature and filters, as vLLM's default.
"""

import numpy as np
import torch
from torch import Tensor

from services.worker.plan import Ids, Ints, LogprobColumns
from services.worker.rowwise import largest


def measure(logits: Tensor, tokens: Tensor, num_top: Ints) -> LogprobColumns:
    """Describe one sampled token per row.

    Args:
        logits: [S, V] raw logits of the rows that asked.
        tokens: [S] their sampled tokens.
        num_top: [S] alternatives asked for, 0 for none.
    """
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = 1 + (logprobs > chosen).sum(dim=1)
    widest = int(num_top.max(initial=0))
    top_values, top_ids = largest(logprobs, widest)
    is_asked = np.arange(widest) < num_top[:, None]
    return LogprobColumns(
        sampled_logprobs=chosen[:, 0].cpu().numpy(),
        sampled_ranks=_ids(ranks),
        num_top_logprobs=num_top,
        top_token_ids=_ids(top_ids)[is_asked],
        top_logprobs=top_values.cpu().numpy()[is_asked],
    )


def _ids(tensor: Tensor) -> Ids:
    return tensor.cpu().numpy().astype(np.uint32)
