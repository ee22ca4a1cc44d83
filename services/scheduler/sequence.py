"""One stream of token ids being extended, and the request that it belongs to.

A sequence is only counted here; the rules that move the counts live in `batch.py` and `core.py`.
Law of the counts: `num_planned_tokens` positions have been ordered from the worker (results of
plans in flight included, but none of the drafts that they may keep); positions below `plan_limit`
may be ordered, with all drafts, without a further thought.
"""

import dataclasses
import enum
from array import array
from typing import TYPE_CHECKING, Final

from services.scheduler.messages import SequenceSubmit, Submission, Timeline
from services.scheduler.outlet import Outlet
from shared.sampling import SamplingSpec, SequenceStats

if TYPE_CHECKING:
    from services.scheduler.prefix_cache import Found
    from shared.block_hashes import BlockHashes

# The replica of a sequence that waits for any of them.
NOWHERE: Final = -1


class SequenceState(enum.IntEnum):
    """Where a sequence is; a preempted one is waiting again."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class Request:
    """The sequences that were submitted together, as long as one of them lives."""

    __slots__ = (
        "cache_root",
        "cache_salt",
        "live",
        "priority",
        "request_id",
        "tenant_id",
        "traceparent",
    )

    def __init__(self, submission: Submission) -> None:
        """Start without sequences."""
        self.request_id = submission.request_id
        self.traceparent = submission.traceparent
        self.priority = submission.priority
        self.tenant_id = submission.tenant_id
        self.cache_salt = submission.cache_salt
        # Digest of the model and block size, and what they make of the salt.
        self.cache_root: tuple[tuple[str, int], bytes] | None = None
        self.live: list[Sequence] = []


class Sequence:
    """Tokens, counts and resources of one sequence; written by `core.py` and `batch.py` only.

    Args:
        request: Its request.
        outlet: Where its tokens go.
        submit: What was asked for.
        sampling: Resolved, with the seed of this sequence.
        arrived_at: Time of the submit, seconds.
    """

    __slots__ = (
        "admission",
        "arrived_at",
        "blocks",
        "first_token_at",
        "found",
        "hashes",
        "is_growable",
        "is_plain",
        "is_resumed",
        "last_step",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_displacements",
        "num_drafted_tokens",
        "num_losses",
        "num_named_blocks",
        "num_passed_blocks",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sent_blocks",
        "num_steps",
        "number",
        "outlet",
        "output_token_ids",
        "plan_limit",
        "planned_at",
        "prompt_token_ids",
        "replay",
        "replica",
        "request",
        "row",
        "sampling",
        "state",
        "stream_id",
        "total_limit",
        "waits_since",
        "wants_logprobs",
    )

    def __init__(
        self,
        request: Request,
        outlet: Outlet,
        submit: SequenceSubmit,
        sampling: SamplingSpec,
        arrived_at: float,
    ) -> None:
        """A waiting sequence that holds nothing."""
        self.request = request
        self.outlet = outlet
        self.stream_id = submit.stream_id
        self.prompt_token_ids = submit.prompt_token_ids
        self.output_token_ids = array("I", submit.output_token_ids)
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        # Whether it ran at another scheduler, or at an earlier run of this one.
        self.is_resumed = bool(submit.output_token_ids)
        self.sampling = sampling
        self.replay = submit.replay
        self.wants_logprobs = sampling.num_logprobs is not None
        self.arrived_at = arrived_at
        self.waits_since = arrived_at
        # Place among those that waited at any time; given by the first queue.
        self.number = -1
        self.planned_at: float | None = None
        self.first_token_at: float | None = None
        self.state = SequenceState.WAITING
        # Most tokens that the sequence can have; the worker ends it there.
        self.total_limit = self.num_prompt_tokens + sampling.max_tokens
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_displacements = 0
        self.num_losses = 0
        # Blocks given to others while it was their turn to wait for room.
        self.num_passed_blocks = 0
        # Output tokens that its tenant has been charged for.
        self.num_charged_tokens = len(self.output_token_ids)
        self.num_steps = 0
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.admission = 0
        # The replica on which it runs, or waits for its turn.
        self.replica = NOWHERE
        self.row = -1
        self.blocks: list[int] = []
        # Blocks that the worker has been told of.
        self.num_sent_blocks = 0
        # Names of its full blocks, as far as they were needed; what the cache has while it waits.
        self.hashes: BlockHashes | None = None
        self.found: Found | None = None
        # Blocks that have a name, or whose content had one already.
        self.num_named_blocks = 0
        self.num_planned_tokens = 0
        self.plan_limit = 0
        self.last_step = 0
        # Whether it may need a further block some day.
        self.is_growable = False
        # Running and without extras: new tokens are all that a result can bring.
        self.is_plain = False

    @property
    def priority(self) -> int:
        """As it was asked for; smaller is earlier."""
        return self.request.priority

    @property
    def tenant_id(self) -> str:
        """Whose it is, for fairness."""
        return self.request.tenant_id

    @property
    def num_tokens(self) -> int:
        """Confirmed tokens, prompt and output."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    def cut_to(self, max_len: int) -> None:
        """Let the sequence end at `max_len` tokens, if it would go further."""
        if self.total_limit > max_len:
            self.total_limit = max_len
            max_tokens = max_len - self.num_prompt_tokens
            self.sampling = dataclasses.replace(self.sampling, max_tokens=max_tokens)

    def leave(self, state: SequenceState) -> None:
        """Stop running; the caller has taken row and blocks."""
        self.state = state
        self.row = -1
        self.plan_limit = 0
        self.is_plain = False
        self.is_growable = False

    def stats(self, now: float, num_output_tokens: int) -> SequenceStats:
        """Counts and times at the end of the sequence."""
        planned_at = now if self.planned_at is None else self.planned_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return SequenceStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=num_output_tokens,
            queue_us=_microseconds(planned_at - self.arrived_at),
            prefill_us=_microseconds(first_token_at - planned_at),
            decode_us=_microseconds(now - first_token_at),
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_drafted_tokens=self.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )

    def timeline(self, now: float) -> Timeline:
        """Stations of the sequence, for traces."""
        return Timeline(
            request_id=self.request.request_id,
            traceparent=self.request.traceparent,
            arrived_at=self.arrived_at,
            planned_at=self.planned_at,
            first_token_at=self.first_token_at,
            ended_at=now,
        )


def _microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
