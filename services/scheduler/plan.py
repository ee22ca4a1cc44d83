"""What the scheduler and a worker group say to each other, as plain values.

Columns are lists and arrays whose entry i speaks about sequence i of the step. The messages of
glm.v1 that carry them are built and read in `worker_client.py` only.
"""

import enum
from array import array
from dataclasses import dataclass, field

from shared.errors import GlmMeshError, RequestError
from shared.sampling import ReplayScript, SamplingSpec, TokenLogprobs

# A row computes one token more, and 16 are what the attention of an NPU takes of a row.
MAX_SPECULATIVE_TOKENS = 15


class WorkerLostError(GlmMeshError):
    """The epoch is over without fault of a plan or a sequence. The text is ours, not a peer's."""


class WorkerContractError(GlmMeshError):
    """The worker broke the rules of the step protocol; its epoch is over."""


class FinishCode(enum.IntEnum):
    """What the worker saw at a sequence; the numbers are those of glm.v1.FinishCode."""

    NONE = 0
    EOS = 1
    STOP_TOKEN = 2
    MAX_TOKENS = 3
    MAX_MODEL_LEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Limits of a worker group; fields of glm.v1.WorkerCapacity. Block 0 is scratch."""

    num_blocks: int
    block_size_tokens: int
    num_rows: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = 0
    model_digest: str = ""
    is_replay: bool = False
    version: str = ""
    num_speculative_tokens: int = 0
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    moe_methods: tuple[tuple[int, int], ...] = ()
    """Methods of ticks by their tokens, ascending; the numbers are glm.v1.MoeMethod's."""
    captured_num_seqs: tuple[int, ...] = ()
    """Sequences of the captured steps that a tick may ask for, ascending."""

    def __post_init__(self) -> None:
        """A worker that can hold nothing cannot be served."""
        bounds = {
            "num_blocks": 2,  # block 0 is scratch
            "block_size_tokens": 1,
            "num_rows": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "max_model_len": 2,  # one prompt token and one output token
        }
        for name, least in bounds.items():
            value = getattr(self, name)
            if value < least:
                raise WorkerContractError(f"capacity {name} is {value}, at least {least} needed")
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise WorkerContractError(
                f"capacity num_speculative_tokens is {self.num_speculative_tokens}, "
                f"at most {MAX_SPECULATIVE_TOKENS} allowed"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that takes a row; one shape for admission and resume."""

    row: int
    request_id: str
    prompt_token_ids: "array[int]"
    output_token_ids: "array[int]"
    num_computed_tokens: int
    sampling: SamplingSpec
    replay: ReplayScript | None
    traceparent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """How a step meets those of the other replicas of its world; fields of glm.v1.Tick."""

    num_tokens: int
    moe_method: int
    num_draft_passes: int = 0
    num_draft_rows: int = 0
    captured_num_seqs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The order for one step.

    `num_computed_tokens` is the position of the first token to compute: it counts the tokens of
    plans in flight, which the worker finishes first, but not the drafts that they may keep.
    `num_scheduled_tokens` beyond the known tokens of a row are room for drafts. `new_blocks` is cut
    by `num_new_blocks`.
    """

    step: int
    rows: list[int]
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    num_new_blocks: list[int]
    new_blocks: "array[int]"
    new_sequences: list[NewSequence]
    freed_rows: list[int]
    tick: Tick | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer to the plan with the same step.

    `logprobs` has one entry per token of the rows that asked for them, in order.
    `num_drafted_tokens` and `num_accepted_tokens` are empty from a worker without drafts.
    `row_failures` maps a row that failed alone to its error; `failure` fails the whole step.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_sampled_tokens: list[int] = field(default_factory=list)
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    finish_codes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    row_failures: dict[int, RequestError] = field(default_factory=dict)
    failure: RequestError | None = None
    num_drafted_tokens: list[int] = field(default_factory=list)
    num_accepted_tokens: list[int] = field(default_factory=list)
    wait_us: int = 0
    """How long the worker had waited for the plan."""
    num_masks: int = 0
    """Masks of constraints that were made for the step."""
    mask_us: int = 0
    """Time that making them took."""
    prompt_logprobs: list[tuple[int, int, list[TokenLogprobs]]] = field(default_factory=list)
    """Row, position of the first token and entries of prompts that are measured."""
