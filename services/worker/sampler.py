"""One token per row from the logits of a step, in one pass over the batch.

Rows that are greedy and change nothing cost one search for the largest logit, which also finds
rows whose logits are not finite. Only the other rows are copied, shaped and drawn. Ids past the
tokenizer are cut off first, so they can neither be sampled nor listed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.draw import DrawSettings, draw
from services.worker.logprobs import measure
from services.worker.plan import Ints, LogprobColumns
from services.worker.rowwise import argmax_rows
from services.worker.sampling_rows import SamplingRows
from services.worker.shaping import shape_logits
from services.worker.uniform import uniform


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What was sampled for S rows."""

    tokens: Ints
    is_finite: NDArray[np.bool_]
    """False where the model's numbers are broken; the token then means nothing."""
    logprobs: LogprobColumns | None


@torch.inference_mode()
def sample(
    logits: Tensor, settings: SamplingRows, rows: Ints, num_outputs: Ints, num_logprobs: Ints
) -> Sampled:
    """Sample one token for each row.

    Args:
        logits: [S, V] float32, raw; not changed.
        settings: Columns over all rows.
        rows: [S] the rows the logits belong to.
        num_outputs: [S] output tokens each row has so far.
        num_logprobs: [S] alternatives asked for, -1 for no logprobs.
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(rows)
    known = logits[:, : settings.vocab_size]
    values, tokens = argmax_rows(known)
    work = np.flatnonzero(settings.is_shaped[rows] | ~settings.is_greedy[rows])
    if len(work):
        chosen, best = _sample_shaped(known, settings, rows, num_outputs, work)
        at = torch.from_numpy(work).to(logits.device)
        tokens[at] = chosen
        # A sum with a NaN or an infinity is none: both views of the row must be finite.
        values[at] += best
    is_finite = torch.isfinite(values).cpu().numpy()
    asked = np.flatnonzero((num_logprobs >= 0) & is_finite)
    columns = None
    if len(asked):
        at = torch.from_numpy(asked).to(logits.device)
        columns = measure(known[at], tokens[at], num_logprobs[asked])
    return Sampled(tokens=tokens.cpu().numpy(), is_finite=is_finite, logprobs=columns)


def _sample_shaped(
    known: Tensor, settings: SamplingRows, rows: Ints, num_outputs: Ints, work: Ints
) -> tuple[Tensor, Tensor]:
    """Tokens of the rows that are shaped or drawn, and the largest logit of each."""
    # Indexing copies: the raw logits stay as they are.
    logits = known[torch.from_numpy(work).to(known.device)]
    rows, num_outputs = rows[work], num_outputs[work]
    shaped = np.flatnonzero(settings.is_shaped[rows])
    if len(shaped):
        entries = [(int(index), settings.shapes[int(rows[index])]) for index in shaped]
        shape_logits(logits, entries, num_outputs[shaped])
    best, tokens = argmax_rows(logits)
    drawn = np.flatnonzero(~settings.is_greedy[rows])
    if len(drawn):
        at = torch.from_numpy(drawn).to(known.device)
        tokens[at] = _draw(logits, settings, rows[drawn], num_outputs[drawn], at)
    return tokens, best


def _draw(
    logits: Tensor, settings: SamplingRows, rows: Ints, num_outputs: Ints, at: Tensor
) -> Tensor:
    device = logits.device
    temperature = torch.from_numpy(settings.temperature[rows]).to(device)
    scaled = (logits if len(at) == len(logits) else logits[at]) / temperature[:, None]
    u = uniform(
        torch.from_numpy(settings.seed[rows]).to(device), torch.from_numpy(num_outputs).to(device)
    )
    filters = DrawSettings(
        top_k=settings.top_k[rows], top_p=settings.top_p[rows], min_p=settings.min_p[rows]
    )
    return draw(scaled, filters, u)
