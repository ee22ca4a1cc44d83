"""What a request changes in its logits before anything is drawn.

In this order:

1. what the request does not allow, bad words and a spent thinking budget (`token_limits`);
2. ids that would end the sequence are impossible until `min_tokens` outputs exist;
3. `logit_bias` is added;
4. repetition penalty over prompt and output, then frequency and presence penalty over the output.

Only the few logits concerned are touched, all rows of a step together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.plan import Floats, Ids, Ints, NewSequence
from services.worker.rows import ending_ids
from services.worker.token_counts import Occurrences, TokenCounts
from services.worker.token_limits import TokenLimits
from shared.sampling import SamplingSpec

_NO_IDS: Ids = np.empty(0, np.uint32)


@dataclass(slots=True)
class RowShape:
    """What one row changes."""

    spec: SamplingSpec
    end_ids: Ints
    bias_ids: Ints
    bias_values: Floats
    counts: TokenCounts | None
    limits: TokenLimits | None = None

    @classmethod
    def of(cls, new: NewSequence, vocab_size: int) -> "RowShape | None":
        """The changes of a new or resumed sequence, None when it makes none."""
        spec = new.sampling
        ends = np.unique([token for token in ending_ids(spec) if token < vocab_size])
        # A mask over every id would leave nothing to sample: min_tokens yields.
        has_mask = spec.min_tokens > len(new.output_token_ids) and 0 < len(ends) < vocab_size
        has_penalties = _has_penalties(spec)
        limits = TokenLimits.of(spec, new.output_token_ids, vocab_size)
        if not (has_mask or has_penalties or spec.logit_bias or limits):
            return None
        prompt = new.prompt_token_ids if spec.repetition_penalty != 1 else _NO_IDS
        return cls(
            spec=spec,
            end_ids=ends.astype(np.int64) if has_mask else np.empty(0, np.int64),
            bias_ids=np.array([token for token, _ in spec.logit_bias], np.int64),
            bias_values=np.array([value for _, value in spec.logit_bias], np.float32),
            counts=TokenCounts(prompt, new.output_token_ids) if has_penalties else None,
            limits=limits,
        )

    def add(self, token: int) -> None:
        """Take note of an output token."""
        if self.counts is not None:
            self.counts.add(token)
        if self.limits is not None:
            self.limits.add(token)


def shape_logits(
    logits: Tensor,
    entries: Sequence[tuple[int, RowShape]],
    outputs: Ints,
    drafts: Sequence[Ints] | None = None,
) -> None:
    """Change `logits` [S, V] in place.

    Args:
        logits: Contiguous float32.
        entries: Row of `logits` and what to change there, ascending.
        outputs: Output tokens that each entry has so far, drafts included.
        drafts: Drafts that each entry takes for granted: the last of its outputs, which its shape
            does not know.
    """
    flat = logits.view(-1)
    width = logits.shape[1]
    is_held = _limit(logits, entries, outputs, drafts)
    _mask_ends(flat, width, entries, outputs, is_held)
    _add_bias(flat, width, entries)
    _penalise(flat, width, entries, drafts)


def _limit(
    logits: Tensor,
    entries: Sequence[tuple[int, RowShape]],
    outputs: Ints,
    drafts: Sequence[Ints] | None,
) -> set[int]:
    """Apply the limits of tokens; rows of `logits` in which ends may not be masked any more."""
    is_held: set[int] = set()
    for place, (index, shape) in enumerate(entries):
        if shape.limits is not None:
            ahead = () if drafts is None else drafts[place].tolist()
            masked = shape.end_ids if outputs[place] < shape.spec.min_tokens else shape.end_ids[:0]
            if shape.limits.apply(logits[index], ahead, masked):
                is_held.add(index)
    return is_held


def _mask_ends(
    flat: Tensor,
    width: int,
    entries: Sequence[tuple[int, RowShape]],
    outputs: Ints,
    is_held: set[int],
) -> None:
    places = [
        shape.end_ids + index * width
        for (index, shape), count in zip(entries, outputs.tolist(), strict=True)
        if len(shape.end_ids) and count < shape.spec.min_tokens and index not in is_held
    ]
    if places:
        flat.index_fill_(0, _on_device(np.concatenate(places), flat), float("-inf"))


def _add_bias(flat: Tensor, width: int, entries: Sequence[tuple[int, RowShape]]) -> None:
    biased = [(index, shape) for index, shape in entries if len(shape.bias_ids)]
    if biased:
        places = np.concatenate([shape.bias_ids + index * width for index, shape in biased])
        values = np.concatenate([shape.bias_values for _, shape in biased])
        flat.index_add_(0, _on_device(places, flat), _on_device(values, flat))


def _penalise(
    flat: Tensor,
    width: int,
    entries: Sequence[tuple[int, RowShape]],
    drafts: Sequence[Ints] | None,
) -> None:
    found: list[tuple[int, SamplingSpec, TokenCounts | Occurrences]] = [
        (index, shape.spec, shape.counts if drafts is None else shape.counts.after(drafts[place]))
        for place, (index, shape) in enumerate(entries)
        if shape.counts
    ]
    if not found:
        return
    sizes = [len(counts.ids) for _, _, counts in found]
    places = np.concatenate([counts.ids + index * width for index, _, counts in found])
    occurrences = np.concatenate([counts.counts for _, _, counts in found])
    factor = _spread([spec.repetition_penalty for _, spec, _ in found], sizes)
    minus = occurrences * _spread([spec.frequency_penalty for _, spec, _ in found], sizes)
    minus += (occurrences > 0) * _spread([spec.presence_penalty for _, spec, _ in found], sizes)
    at = _on_device(places, flat)
    factors = _on_device(factor.astype(np.float32), flat)
    values = flat[at]
    values = torch.where(values > 0, values / factors, values * factors)
    flat[at] = values - _on_device(minus.astype(np.float32), flat)


def _spread(values: Sequence[float], sizes: Sequence[int]) -> Floats:
    return np.repeat(np.array(values, np.float32), sizes)


def _has_penalties(spec: SamplingSpec) -> bool:
    return spec.repetition_penalty != 1 or spec.presence_penalty != 0 or spec.frequency_penalty != 0


def _on_device(values: "Ints | Floats", like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
