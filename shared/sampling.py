"""How the next token of a sequence is chosen, and what a request's output cost: plain values.

A `SamplingSpec` is complete: the frontend resolves every default, no later stage fills one in.
"""

from dataclasses import dataclass

from shared.constraint import Constraint


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """Bounds the think block that the prompt opened; fields of glm.v1.ThinkingBudget.

    After `max_tokens` generated tokens `end_token_id` is forced, unless one of `end_ids` came.
    """

    max_tokens: int
    end_token_id: int
    other_end_token_ids: tuple[int, ...] = ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends the block."""
        return (self.end_token_id, *self.other_end_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """Sampling settings of a request; the fields are those of glm.v1.SamplingParams.

    `seed` keys counter-based random numbers and is always set (also for unseeded requests).
    `num_logprobs` None means no logprobs, 0 the sampled token only. `eos_token_ids` has the
    primary id first. `logit_bias` pairs (token id, shift). `allowed_token_ids` empty allows all;
    `bad_words` are runs of ids that may not appear in the output.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    num_logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking_budget: ThinkingBudget | None = None
    constraint: Constraint | None = None
    skip_reading_prefix_cache: bool = False
    # As num_logprobs, of the prompt's tokens.
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayScript:
    """What a replay worker emits: ids in order, then the primary eos; step sizes are cycled."""

    token_ids: tuple[int, ...]
    tokens_per_step: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStats:
    """Token counts of one sequence and where its time went; fields of glm.v1.SequenceStats."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probability of one sampled token and its best alternatives, most likely first."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """What one worker group does; fields of glm.v1.ReplicaLoad."""

    is_ready: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_steps_total: int = 0
    num_cached_blocks: int = 0
    num_prefix_cache_queries_total: int = 0
    num_prefix_cache_hits_total: int = 0
    is_draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSnapshot:
    """State of one scheduler; fields of glm.v1.LoadSnapshot."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_steps_total: int = 0
    num_prompt_tokens_total: int = 0
    num_output_tokens_total: int = 0
    num_preemptions_total: int = 0
    num_aborts_total: int = 0
    is_worker_ready: bool = False
    max_model_len: int = 0
    num_drafts_total: int = 0
    num_drafted_tokens_total: int = 0
    num_accepted_tokens_per_position: tuple[int, ...] = ()
    num_cached_blocks: int = 0
    num_prefix_cache_queries_total: int = 0
    num_prefix_cache_hits_total: int = 0
    replicas: tuple[ReplicaLoad, ...] = ()
    num_recomputed_tokens_total: int = 0
    step_us_total: int = 0
    step_idle_us_total: int = 0
    gc_pause_us_total: int = 0
    max_gc_pause_us: int = 0
    num_prepared_total: int = 0
    prepare_us_total: int = 0
    num_masks_total: int = 0
    mask_us_total: int = 0
    instance_id: str = ""
    is_draining: bool = False
    model_digest: str = ""
    block_size_tokens: int = 0
    num_catch_up_tokens: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_schedulers: int = 0
    num_reached_schedulers: int = 0
    num_scheduler_losses_total: int = 0
    num_resubmissions_total: int = 0
    num_unresumed_total: int = 0
