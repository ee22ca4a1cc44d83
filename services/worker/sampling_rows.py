"""How each row samples: the resolved settings of its sequence as columns over all rows."""

import math

import numpy as np
from numpy.typing import NDArray

from services.worker.grammar.rows import RowConstraints
from services.worker.plan import Ints, NewSequence
from services.worker.shaping import RowShape
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec

# vLLM's bound: a smaller temperature is greedy.
_GREEDY_BELOW = 1e-5

# Field, least, greatest; the bounds are those of glm.v1.SamplingParams.
_BOUNDS: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, math.inf),
)
_MORE_THAN_LEAST = frozenset({"top_p", "repetition_penalty"})


class SamplingRows:
    """Columns over all rows. One thread uses it."""

    def __init__(
        self, num_rows: int, vocab_size: int, constraints: RowConstraints | None = None
    ) -> None:
        """`vocab_size` counts the ids that may be sampled; by default nothing is constrained."""
        self.vocab_size = vocab_size
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.int64)
        self.is_greedy = np.ones(num_rows, np.bool_)
        self.is_shaped: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.shapes: dict[int, RowShape] = {}
        self.constraints = constraints or RowConstraints(num_rows)

    def admit(self, new: NewSequence) -> None:
        """Take the settings of a new sequence, its outputs so far included.

        Raises:
            RequestError: A setting is out of range; only this sequence fails.
        """
        spec, row = new.sampling, new.row
        _check(spec, self.vocab_size)
        self.is_greedy[row] = spec.temperature < _GREEDY_BELOW
        self.temperature[row] = spec.temperature
        self.top_k[row] = spec.top_k
        self.top_p[row] = spec.top_p
        self.min_p[row] = spec.min_p
        # The same 64 bits, read as a signed number: tensors know no unsigned arithmetic.
        self.seed[row] = np.uint64(spec.seed).astype(np.int64)
        shape = RowShape.of(new, self.vocab_size)
        self.is_shaped[row] = shape is not None
        if shape is not None:
            self.shapes[row] = shape
        self.constraints.admit(new)

    def free(self, row: int) -> None:
        """Forget a row."""
        self.is_shaped[row] = False
        self.shapes.pop(row, None)
        self.constraints.free(row)

    def reset(self) -> None:
        """Forget every row."""
        self.is_shaped[:] = False
        self.shapes.clear()
        self.constraints.reset()

    def note(self, rows: Ints, tokens: Ints) -> None:
        """Take note of the tokens that were kept for rows."""
        self.constraints.note(rows, tokens)
        if not self.shapes:
            return
        shaped = np.flatnonzero(self.is_shaped[rows])
        for row, token in zip(rows[shaped].tolist(), tokens[shaped].tolist(), strict=True):
            self.shapes[row].add(token)


def _check(spec: SamplingSpec, vocab_size: int) -> None:
    for name, least, greatest in _BOUNDS:
        value = getattr(spec, name)
        is_within = value > least if name in _MORE_THAN_LEAST else value >= least
        # float32 of the wire may round a bound up a little.
        if not (is_within and value <= greatest + 1e-6 and math.isfinite(value)):
            raise _refused(name, value, f"must be within {least} and {greatest}")
    for name in ("num_logprobs", "num_prompt_logprobs"):
        if (getattr(spec, name) or 0) > vocab_size:
            raise _refused(name, getattr(spec, name), f"must be at most {vocab_size}")
    for token, shift in spec.logit_bias:
        if not 0 <= token < vocab_size:
            raise _refused("logit_bias", token, f"no token id below {vocab_size}")
        if not math.isfinite(shift):
            raise _refused("logit_bias", shift, "must be finite")
    budget = spec.thinking_budget
    limited = {
        "allowed_token_ids": spec.allowed_token_ids,
        "bad_words": [token for run in spec.bad_words for token in run],
        "thinking_budget": budget.end_ids if budget is not None else (),
    }
    for name, tokens in limited.items():
        if tokens and not 0 <= max(tokens) < vocab_size:
            raise _refused(name, max(tokens), f"no token id below {vocab_size}")


def _refused(field: str, value: float, rule: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field} {value}: {rule}", field=field)
