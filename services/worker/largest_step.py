"""The step that takes most memory: as many tokens, and as many sampled places, as a plan may have.

A device's blocks are counted from what is left beside it, so whatever a later step allocates must
have been allocated here: the copies that sampling makes of the logits too (some 34 bytes per
logit, which for 256 rows of GLM-5.2's vocabulary is more than a GiB).
"""

import numpy as np
import torch
from torch import Tensor

from services.worker.dummy import dummy_step
from services.worker.kv_cache import allocate
from services.worker.model.decoder import Decoder
from services.worker.plan import NewSequence
from services.worker.sampler import sample
from services.worker.sampling_rows import SamplingRows
from services.worker.settings import WorkerSettings
from shared.sampling import SamplingSpec

_MAX_LOGPROBS = 1024
"""Alternatives that the scheduler lets a request ask for."""

# Everything that makes the sampler copy, sort or sum the logits of a row.
_SAMPLING = SamplingSpec(
    temperature=0.7,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
)


@torch.inference_mode()
def run_largest_step(settings: WorkerSettings, decoder: Decoder, max_model_len: int) -> None:
    """Run it once, in caches of its own."""
    caches = allocate(decoder.spec, 2)
    # Sequences no longer than a longest one, which share the tokens.
    num_seqs = -(-settings.max_num_batched_tokens // max_model_len)
    num_tokens = settings.max_num_batched_tokens // num_seqs
    token_ids, step = dummy_step(num_seqs, num_tokens, decoder.device)
    hidden = decoder.forward(token_ids, step, caches)
    if decoder.lm_head is None:
        return
    num_sampled = settings.max_num_seqs * (1 + settings.num_speculative_tokens)
    _sample_all(decoder.compute_logits(hidden[:num_sampled]))
    if decoder.mtp is not None:
        hidden = decoder.draft(token_ids, hidden, step, caches)
        decoder.compute_draft_logits(hidden[: settings.max_num_seqs])


def _sample_all(logits: Tensor) -> None:
    """Sample from every row of [S, V] logits with every setting that a request may have."""
    count, vocab_size = logits.shape
    rows = SamplingRows(count, vocab_size)
    for row in range(count):
        rows.admit(_sequence(row))
    places = np.arange(count)
    alternatives = np.full(count, min(_MAX_LOGPROBS, vocab_size))
    sample(logits, rows, places, np.zeros(count, np.int64), alternatives)


def _sequence(row: int) -> NewSequence:
    return NewSequence(
        row=row,
        request_id="largest step",
        prompt_token_ids=np.zeros(1, np.uint32),
        output_token_ids=np.zeros(1, np.uint32),
        num_computed_tokens=0,
        sampling=_SAMPLING,
    )
