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
    chosen = logits.gather(1, tokens[:, None])
    log_total = torch.logsumexp(logits, dim=1, keepdim=True)
    ranks = 1 + (logits > chosen).sum(dim=1)
    widest = int(num_top.max(initial=0))
    top_values, top_ids = largest(logits, widest) if widest else (logits[:, :0], logits[:, :0])
    is_asked = np.arange(widest) < num_top[:, None]
    return LogprobColumns(
        sampled_logprobs=(chosen - log_total)[:, 0].cpu().numpy(),
        sampled_ranks=_ids(ranks),
        num_top_logprobs=num_top,
        top_token_ids=_ids(top_ids)[is_asked],
        top_logprobs=(top_values - log_total).cpu().numpy()[is_asked],
    )


def _ids(tensor: Tensor) -> Ids:
    return tensor.cpu().numpy().astype(np.uint32)
