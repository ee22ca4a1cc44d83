"""What a scheduler orders and what a worker answers, as plain values.

The fields are those of `StepPlan` and `StepResult` in protos/glm/v1/worker.proto; columns are numpy
arrays and entry i of every column belongs to sequence i of the step. `server.py` turns messages
into these values and back, nothing else in the worker knows the messages.
"""

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.parallel.moe_method import MoeMethod
from shared.errors import FailureReason, RequestError
from shared.sampling import ReplayScript, SamplingSpec

Ints = NDArray[np.int64]
Ids = NDArray[np.uint32]
Floats = NDArray[np.float32]


class FinishCode(enum.IntEnum):
    """What the worker saw at a sequence after a step; numbers of glm.v1.FinishCode."""

    GOES_ON = 0
    EOS = 1
    STOP_TOKEN = 2
    MAX_TOKENS = 3
    MAX_MODEL_LEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limits of a worker group; plans stay inside them. Block 0 is scratch, rows start at 0."""

    num_blocks: int
    block_size: int
    num_rows: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size_bytes: int
    model_digest: str = ""
    is_replay: bool = False
    num_speculative_tokens: int = 0
    """Most drafts of a row; a decoding row computes one token more than it has drafts."""
    data_parallel_size: int = 1
    """Replicas of the expert-parallel world that this one is part of; above 1 plans have ticks."""
    data_parallel_rank: int = 0
    moe_ladder: tuple[tuple[int, MoeMethod], ...] = ()
    """Methods of ticks of up to so many tokens, ascending; empty where there is no choice."""
    captured_num_seqs: tuple[int, ...] = ()
    """Sequences of the captured steps that a tick may ask for, ascending."""

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewSequence:
    """A sequence that takes a row: admitted, resumed or moved here.

    `error` is what made its description unreadable; such a row fails alone.
    """

    row: int
    request_id: str
    prompt_token_ids: Ids
    output_token_ids: Ids
    num_computed_tokens: int
    sampling: SamplingSpec
    replay: ReplayScript | None = None
    traceparent: str = ""
    error: RequestError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """How a step meets the steps of other replicas: the same in the plans of all of them."""

    num_tokens: int
    """Most tokens of a replica's plan; at least 1, as a replica without rows computes one."""
    method: MoeMethod
    num_draft_passes: int = 0
    """Passes of the MTP layer behind the step; the first one is over all of its tokens."""
    num_draft_rows: int = 0
    """Most rows of a replica that may get drafts; at least 1 if there are later passes."""
    captured_num_seqs: int = 0
    """Sequences of the captured step that all replicas take; 0: it is not captured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """The order for one step; holds only what changed."""

    step: int
    rows: Ints
    num_scheduled_tokens: Ints
    num_computed_tokens: Ints
    num_new_blocks: Ints
    new_blocks: Ids
    new_sequences: tuple[NewSequence, ...] = ()
    freed_rows: tuple[int, ...] = ()
    tick: Tick | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobColumns:
    """Log-probabilities of the tokens of all rows that asked, in order of the plan."""

    sampled_logprobs: Floats
    sampled_ranks: Ids
    num_top_logprobs: Ints
    top_token_ids: Ids
    top_logprobs: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowPromptLogprobs:
    """Log-probabilities of the prompt tokens of a row from position `start` on."""

    row: int
    start: int
    logprobs: LogprobColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Where a step's time went, microseconds on the worker's monotonic clock."""

    wait_us: int = 0
    prepare_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    draft_us: int = 0
    """Proposing the drafts that this step verified, before it."""
    mask_us: int = 0
    """Making the masks of constraints, part of sampling."""
    num_masks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """One row failed alone."""

    row: int
    error: RequestError


def _no_ints() -> Ints:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """The answer to one plan. With `failure` the columns are empty and the epoch is over."""

    step: int
    rows: Ints = field(default_factory=_no_ints)
    num_computed_tokens: Ints = field(default_factory=_no_ints)
    num_sampled_tokens: Ints = field(default_factory=_no_ints)
    sampled_token_ids: Ints = field(default_factory=_no_ints)
    num_drafted_tokens: Ints = field(default_factory=_no_ints)
    """Drafts verified for each row; empty in a worker without drafts."""
    num_accepted_tokens: Ints = field(default_factory=_no_ints)
    """Drafts among the sampled tokens of each row; empty in a worker without drafts."""
    finish_codes: Ints = field(default_factory=_no_ints)
    logprobs: LogprobColumns | None = None
    row_failures: tuple[RowFailure, ...] = ()
    failure: RequestError | None = None
    timings: StepTimings = StepTimings()
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()


class ContractError(RequestError):
    """The other side broke the contract of RunSteps: the step fails as a whole, the epoch ends."""

    def __init__(self, message: str) -> None:
        """Always INVALID_ARGUMENT."""
        super().__init__(FailureReason.INVALID_ARGUMENT, message)
