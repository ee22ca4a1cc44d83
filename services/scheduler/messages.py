"""What the scheduler and its clients say to each other, as plain values.

The messages of glm.v1 that carry them are built and read in `server.py` only.
"""

from array import array
from dataclasses import dataclass, field

from shared.endings import FinishReason
from shared.errors import RequestError
from shared.sampling import ReplayScript, SamplingSpec, SequenceStats, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSubmit:
    """One stream of tokens inside a request; `stream_id` names it at its outlet."""

    stream_id: int
    index: int
    prompt_token_ids: "array[int]"
    output_token_ids: "array[int]"
    seed: int
    replay: ReplayScript | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One response with 1..N sequences.

    `timeout_ms` 0 is the configured maximum, `first_token_timeout_ms` 0 no limit of its own.
    """

    request_id: str
    sequences: tuple[SequenceSubmit, ...]
    sampling: SamplingSpec
    traceparent: str = ""
    priority: int = 0
    timeout_ms: int = 0
    cache_salt: str = ""
    tenant_id: str = ""
    first_token_timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Admitted, or refused for a reason; a refused sequence has no further end."""

    stream_id: int
    refusal: RequestError | None = None


@dataclass(slots=True, kw_only=True)
class TokenColumns:
    """New tokens; entry i of every column belongs to one sequence, `token_ids` is cut by counts."""

    stream_ids: list[int]
    num_previous_tokens: list[int]
    num_tokens: list[int]
    token_ids: "array[int]"
    logprobs: list[TokenLogprobs]
    # Sequences that have their first tokens, and what is known of them by now.
    starts: list[tuple[int, SequenceStats]] = field(default_factory=list)
    # Of the sequences so far; empty where workers propose no drafts.
    num_drafted_tokens: list[int] = field(default_factory=list)
    num_accepted_tokens: list[int] = field(default_factory=list)
    # Stream id, position of the first token, entries of prompts that are measured.
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When a sequence passed its stations, seconds of the clock that the events carried."""

    request_id: str
    traceparent: str
    arrived_at: float
    planned_at: float | None
    first_token_at: float | None
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnd:
    """The one end of an admitted sequence: `finish_reason` or `failure` is set, never both."""

    stream_id: int
    finish_reason: FinishReason | None = None
    failure: RequestError | None = None
    stop_token_id: int | None = None
    stats: SequenceStats
    timeline: Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What one outlet gets after an event: tokens first, then ends."""

    tokens: TokenColumns | None
    ends: list[SequenceEnd]
    verdicts: list[Verdict] = field(default_factory=list)
    """Of submissions that had to wait for theirs; alone, and before any token of them."""
