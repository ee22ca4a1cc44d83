"""One token per row from the logits of a step, in one pass over the batch.

Rows that are greedy and change nothing cost one search for the largest logit, which also finds
rows whose logits are not finite. Only the other rows are copied, shaped, masked and drawn. Ids past
the tokenizer are cut off first, so they can neither be sampled nor listed.

A grammar's mask comes last and is the law. Where what else the request forbids leaves nothing of it
the text ends, if it is complete; else the row fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.draw import DrawSettings, draw
from services.worker.grammar.masking import allow_only
from services.worker.grammar.row import allows
from services.worker.grammar.rows import Masks, stuck
from services.worker.logprobs import measure
from services.worker.plan import Ints, LogprobColumns
from services.worker.rowwise import argmax_rows
from services.worker.sampling_rows import SamplingRows
from services.worker.shaping import shape_logits
from shared.errors import FailureReason, RequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """What was sampled for S rows."""

    tokens: Ints
    is_finite: NDArray[np.bool_]
    """False where the model's numbers are broken; the token then means nothing."""
    logprobs: LogprobColumns | None
    is_stuck: NDArray[np.bool_]
    """True where the constraint of the row has failed."""

    @property
    def is_usable(self) -> NDArray[np.bool_]:
        """Where there is a token."""
        return self.is_finite & ~self.is_stuck

    def failure(self, place: int) -> RequestError:
        """Why there is none at a place."""
        return stuck() if self.is_stuck[place] else not_finite()


@torch.inference_mode()
def sample(
    logits: Tensor,
    settings: SamplingRows,
    rows: Ints,
    num_outputs: Ints,
    num_logprobs: Ints,
    drafts_of: Callable[[int], Ints] | None = None,
) -> Sampled:
    """Sample one token for each row.

    Args:
        logits: [S, V] float32, raw; not changed.
        settings: Columns over all rows.
        rows: [S] the rows the logits belong to; a row that has drafts comes several times.
        num_outputs: [S] output tokens each row has so far, drafts included.
        num_logprobs: [S] alternatives asked for, -1 for no logprobs.
        drafts_of: The drafts that the logits at a place of [S] follow; None where none has any.
    """
    assert logits.dtype == torch.float32
    assert len(logits) == len(rows)
    known = logits[:, : settings.vocab_size]
    values, tokens = argmax_rows(known)
    # Masks are made here, while a device still computes the logits.
    masks = settings.constraints.masks(rows, drafts_of)
    shaped = _Shaped.of(known, settings, rows, num_outputs, drafts_of, masks)
    if shaped is not None:
        best, tokens[shaped.at] = argmax_rows(shaped.logits)
        # A sum with a NaN or an infinity is none: both views of the row must be finite.
        values[shaped.at] += best
    for source, index, places in _drawn(known, shaped, ~settings.is_greedy[rows]):
        at = torch.from_numpy(places).to(logits.device)
        tokens[at] = draw(source, index, _settings(settings, rows[places], num_outputs[places]))
    is_finite = np.isfinite(values.cpu().numpy())
    asked = ((num_logprobs >= 0) & is_finite).nonzero()[0]
    columns = None
    if len(asked):
        at = torch.from_numpy(asked).to(logits.device)
        columns = measure(known[at], tokens[at], num_logprobs[asked])
    return Sampled(
        tokens=tokens.cpu().numpy(),
        is_finite=is_finite,
        logprobs=columns,
        is_stuck=np.zeros_like(is_finite) if masks is None else masks.is_stuck,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shaped:
    """Copies of the rows whose logits a request changes."""

    places: Ints
    """Their places among the S rows, ascending."""
    at: Tensor
    """The same on the device."""
    logits: Tensor

    @classmethod
    def of(
        cls,
        known: Tensor,
        settings: SamplingRows,
        rows: Ints,
        num_outputs: Ints,
        drafts_of: Callable[[int], Ints] | None,
        masks: Masks | None,
    ) -> "_Shaped | None":
        """Copy and change; None when no row is changed."""
        own = settings.is_shaped[rows].nonzero()[0]
        places = own if masks is None else np.union1d(own, masks.places)
        if not len(places):
            return None
        at = torch.from_numpy(places).to(known.device)
        logits = known[at]
        if len(own):
            shapes = [settings.shapes[row] for row in rows[own].tolist()]
            entries = list(zip(np.searchsorted(places, own).tolist(), shapes, strict=True))
            drafts = None if drafts_of is None else list(map(drafts_of, own.tolist()))
            shape_logits(logits, entries, num_outputs[own], drafts)
        if masks is not None and len(masks.places):
            _mask(logits, known, at, masks, places, own)
        return cls(places=places, at=at, logits=logits)


def _mask(logits: Tensor, known: Tensor, at: Tensor, masks: Masks, places: Ints, own: Ints) -> None:
    """Apply masks; where the request itself left nothing of one, the text ends or the row fails."""
    masked = np.searchsorted(places, masks.places)
    allow_only(logits, masked, masks.words)
    both = np.isin(masks.places, own).nonzero()[0]
    if not len(both):
        return
    best, _ = argmax_rows(logits[torch.from_numpy(masked[both]).to(logits.device)])
    for place in both[(best == float("-inf")).cpu().numpy()].tolist():
        row, words = int(masked[place]), masks.words[place].numpy().view(np.uint32)
        ends = [token for token in masks.end_ids[place] if allows(words, token)]
        # Some numbers have to be drawn from even where the row has failed.
        left = ends or slice(None)
        logits[row, left] = known[at[row], left]
        masks.is_stuck[masks.places[place]] |= not ends


def _drawn(
    known: Tensor, shaped: _Shaped | None, is_drawn: NDArray[np.bool_]
) -> Iterator[tuple[Tensor, Ints, Ints]]:
    """Logits to draw from, which of their rows, and the places of those among the S rows."""
    if shaped is not None:
        index = is_drawn[shaped.places].nonzero()[0]
        if len(index):
            yield shaped.logits, index, shaped.places[index]
        is_drawn[shaped.places] = False
    places = is_drawn.nonzero()[0]
    if len(places):
        yield known, places, places


def not_finite() -> RequestError:
    """The failure of a row whose numbers are broken."""
    return RequestError(
        FailureReason.NUMERICAL_ERROR, "the model's numbers for this sequence are not finite"
    )


def _settings(settings: SamplingRows, rows: Ints, num_outputs: Ints) -> DrawSettings:
    return DrawSettings(
        temperature=settings.temperature[rows],
        top_k=settings.top_k[rows],
        top_p=settings.top_p[rows],
        min_p=settings.min_p[rows],
        seeds=settings.seed[rows],
        positions=num_outputs,
    )
