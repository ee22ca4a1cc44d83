"""Whether a submission may enter: its values, its size, the queue. Pure checks, nothing changes.

Clients that speak token ids reach the scheduler without the frontend, so nothing is taken on trust:
a value that a worker could stumble over is refused here, for that request alone.
"""

import math
from collections.abc import Iterable

from services.scheduler.limits import Limits
from services.scheduler.messages import SequenceSubmit, Submission
from shared.constraint import MAX_CONSTRAINT_BYTES, Constraint
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec

MAX_REQUEST_ID_BYTES = 128
# Of one response; the largest n that OpenAI's API takes.
MAX_SEQUENCES = 128
MAX_LOGPROBS = 1024
# Ids that may end one sequence, and tokens that a script may emit in one step: a worker's limits.
MAX_END_IDS = 1024
MAX_ALLOWED_IDS = 8192
MAX_BAD_WORDS = 256
MAX_BAD_WORD_IDS = 64
MAX_TOKENS_PER_STEP = 1024


def check_submission(submission: Submission, limits: Limits) -> None:
    """Raise a `RequestError` that names the field when a value cannot be served."""
    num_bytes = len(submission.request_id.encode())
    if not 0 < num_bytes <= MAX_REQUEST_ID_BYTES:
        raise _invalid(
            "request_id", f"has {num_bytes} bytes, 1 to {MAX_REQUEST_ID_BYTES} are allowed"
        )
    if submission.priority and not limits.is_priority:
        raise RequestError(
            FailureReason.FEATURE_DISABLED,
            f"priority {submission.priority}: this scheduler serves first come, first served; "
            "scheduling_policy priority heeds priorities",
            field="priority",
        )
    if not 0 < len(submission.sequences) <= MAX_SEQUENCES:
        raise _invalid(
            "sequences", f"are {len(submission.sequences)}, 1 to {MAX_SEQUENCES} are allowed"
        )
    _check_sampling(submission.sampling, limits)
    for sequence in submission.sequences:
        _check_sequence(sequence, submission.sampling, limits)


def check_fit(num_tokens: int, limits: Limits) -> None:
    """Raise when `num_tokens` and one more token can never be held."""
    needed = num_tokens + 1
    if needed > limits.max_model_len:
        raise RequestError(
            FailureReason.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_tokens} tokens and needs room for one more, "
            f"the context length is {limits.max_model_len} tokens",
            field="prompt_token_ids",
        )
    if needed > limits.max_sequence_len:
        raise RequestError(
            FailureReason.KV_CAPACITY_EXCEEDED,
            f"{needed} tokens need {limits.blocks_for(needed)} KV blocks, "
            f"the worker has {limits.num_blocks - 1}",
            field="prompt_token_ids",
        )


def _check_sequence(sequence: SequenceSubmit, sampling: SamplingSpec, limits: Limits) -> None:
    if not sequence.prompt_token_ids:
        raise _invalid("prompt_token_ids", "is empty")
    _check_ids("prompt_token_ids", sequence.prompt_token_ids, limits)
    _check_ids("output_token_ids", sequence.output_token_ids, limits)
    num_output_tokens = len(sequence.output_token_ids)
    if num_output_tokens >= sampling.max_tokens:
        raise _invalid(
            "output_token_ids",
            f"has {num_output_tokens} tokens, fewer than max_tokens {sampling.max_tokens} needed",
        )
    check_fit(len(sequence.prompt_token_ids) + num_output_tokens, limits)
    if limits.is_replay and sequence.replay is None:
        raise _invalid("replay", "is missing: this worker replays scripts")
    if sequence.replay is not None:
        if not limits.is_replay:
            raise RequestError(
                FailureReason.FEATURE_DISABLED,
                "replay: this worker computes a model and replays nothing",
                field="replay",
            )
        _check_ids("replay.token_ids", sequence.replay.token_ids, limits)
        sizes = sequence.replay.tokens_per_step
        if not sizes or min(sizes) < 1 or max(sizes) > MAX_TOKENS_PER_STEP:
            raise _invalid(
                "replay.tokens_per_step", f"has a value outside 1 to {MAX_TOKENS_PER_STEP}"
            )


def _check_sampling(sampling: SamplingSpec, limits: Limits) -> None:
    ranges: tuple[tuple[str, float, float], ...] = (
        ("temperature", 0.0, 1e6),
        # Smallest values: what the wire's float32 makes of 1e-9 and 1e-6 is a little less.
        ("top_p", 0.99e-9, 1.0),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -2.0, 2.0),
        ("frequency_penalty", -2.0, 2.0),
        ("repetition_penalty", 0.99e-6, 1e6),
        ("max_tokens", 1, math.inf),
        ("min_tokens", 0, sampling.max_tokens),
        ("num_logprobs", 0, min(MAX_LOGPROBS, limits.vocab_size or MAX_LOGPROBS)),
        ("num_prompt_logprobs", 0, min(MAX_LOGPROBS, limits.vocab_size or MAX_LOGPROBS)),
    )
    for name, least, most in ranges:
        value = getattr(sampling, name)
        # A comparison with NaN is false, so NaN is refused too.
        if value is not None and not least <= value <= most:
            raise _invalid(name, f"is {value}, allowed is {least:g} to {most:g}")
    num_end_ids = len({*sampling.eos_token_ids, *sampling.stop_token_ids})
    if num_end_ids > MAX_END_IDS:
        raise _invalid("stop_token_ids", f"and eos ids are {num_end_ids}, at most {MAX_END_IDS}")
    _check_ids("eos_token_ids", sampling.eos_token_ids, limits)
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits)
    _check_ids("logit_bias_token_ids", (token for token, _ in sampling.logit_bias), limits)
    for token, value in sampling.logit_bias:
        if not -100.0 <= value <= 100.0:
            raise _invalid(
                "logit_bias_values", f"is {value} for token {token}, -100 to 100 allowed"
            )
    _check_token_limits(sampling, limits)
    if sampling.constraint is not None:
        _check_constraint(sampling.constraint, limits)


def _check_constraint(constraint: Constraint, limits: Limits) -> None:
    """Only its size: what it means the worker knows."""
    if limits.is_replay:
        raise RequestError(
            FailureReason.FEATURE_DISABLED,
            "constraint: this worker replays scripts and constrains nothing",
            field="constraint",
        )
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        raise _invalid(
            "constraint", f"has {constraint.num_bytes} bytes, at most {MAX_CONSTRAINT_BYTES}"
        )
    if constraint.start_after_token_id is not None:
        _check_ids("constraint", [constraint.start_after_token_id], limits)


def _check_token_limits(sampling: SamplingSpec, limits: Limits) -> None:
    for name, most in (("allowed_token_ids", MAX_ALLOWED_IDS), ("bad_words", MAX_BAD_WORDS)):
        if len(getattr(sampling, name)) > most:
            raise _invalid(name, f"has more than {most} entries")
    _check_ids("allowed_token_ids", sampling.allowed_token_ids, limits)
    for run in sampling.bad_words:
        if not 1 <= len(run) <= MAX_BAD_WORD_IDS:
            raise _invalid("bad_words", f"has a run without ids or with over {MAX_BAD_WORD_IDS}")
        _check_ids("bad_words", run, limits)
    if sampling.thinking_budget is not None:
        _check_ids("thinking_budget", sampling.thinking_budget.end_ids, limits)


def _check_ids(field: str, token_ids: Iterable[int], limits: Limits) -> None:
    """Ids must be ones that the worker knows; a replay worker may not tell."""
    largest = max(token_ids, default=0)
    if limits.vocab_size and largest >= limits.vocab_size:
        raise _invalid(
            field, f"has token id {largest}, the vocabulary ends at {limits.vocab_size - 1}"
        )


def _invalid(field: str, what: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field} {what}", field=field)
