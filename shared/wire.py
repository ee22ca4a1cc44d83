"""Between the values of `shared` and the messages of glm.v1: the only place that knows both.

Token ids travel as little-endian uint32 bytes. A length that is no multiple of the element size,
or columns of unequal length, end in a `RequestError` that names the column.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence

from protos.glm.v1 import common_pb2
from shared.errors import FailureReason, RequestError
from shared.sampling import (
    LoadSnapshot,
    ReplayScript,
    ReplicaLoad,
    SamplingSpec,
    SequenceStats,
    ThinkingBudget,
    TokenLogprobs,
)
from shared.wire_constraint import constraint_from_proto, constraint_to_proto

if sys.byteorder != "little" or array("I").itemsize != 4:
    raise ImportError("glm-mesh needs a little-endian machine with 4-byte unsigned integers")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token or block ids to little-endian uint32 bytes."""
    return (ids if isinstance(ids, array) else array("I", ids)).tobytes()


def unpack_ids(data: bytes, field: str) -> "array[int]":
    """Little-endian uint32 bytes to an array of ids; `field` names the column in an error."""
    if len(data) % 4:
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            f"{field}: {len(data)} bytes are no run of uint32",
            field=field,
        )
    ids = array("I")
    ids.frombytes(data)
    return ids


def unpack_floats(data: bytes, field: str) -> tuple[float, ...]:
    """Little-endian float32 bytes to floats."""
    if len(data) % 4:
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            f"{field}: {len(data)} bytes are no run of float32",
            field=field,
        )
    return struct.unpack(f"<{len(data) // 4}f", data)


def check_columns(expected: int, **columns: Sequence[object]) -> None:
    """Raise for the first column whose length is not `expected`."""
    for name, column in columns.items():
        if len(column) != expected:
            raise RequestError(
                FailureReason.INVALID_ARGUMENT,
                f"column {name} has {len(column)} entries, {expected} expected",
                field=name,
            )


def sampling_to_proto(spec: SamplingSpec) -> common_pb2.SamplingParams:
    """A spec as its message."""
    return common_pb2.SamplingParams(
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        repetition_penalty=spec.repetition_penalty,
        seed=spec.seed,
        num_logprobs=spec.num_logprobs,
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        eos_token_ids=spec.eos_token_ids,
        stop_token_ids=spec.stop_token_ids,
        ignore_eos=spec.ignore_eos,
        logit_bias_token_ids=[token for token, _ in spec.logit_bias],
        logit_bias_values=[value for _, value in spec.logit_bias],
        allowed_token_ids=spec.allowed_token_ids,
        bad_words=[common_pb2.TokenRun(token_ids=ids) for ids in spec.bad_words],
        thinking_budget=_budget_to_proto(spec.thinking_budget),
        constraint=constraint_to_proto(spec.constraint),
        skip_reading_prefix_cache=spec.skip_reading_prefix_cache,
        num_prompt_logprobs=spec.num_prompt_logprobs,
    )


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingSpec:
    """A message as a spec; the two bias columns must have equal length."""
    check_columns(len(message.logit_bias_token_ids), logit_bias_values=message.logit_bias_values)
    return SamplingSpec(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        seed=message.seed,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(zip(message.logit_bias_token_ids, message.logit_bias_values, strict=True)),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(run.token_ids) for run in message.bad_words),
        thinking_budget=_budget_from_proto(message.thinking_budget)
        if message.HasField("thinking_budget")
        else None,
        constraint=constraint_from_proto(message.constraint)
        if message.HasField("constraint")
        else None,
        skip_reading_prefix_cache=message.skip_reading_prefix_cache,
        num_prompt_logprobs=(
            message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None
        ),
    )


def _budget_to_proto(budget: ThinkingBudget | None) -> common_pb2.ThinkingBudget | None:
    if budget is None:
        return None
    return common_pb2.ThinkingBudget(
        max_tokens=budget.max_tokens,
        end_token_id=budget.end_token_id,
        other_end_token_ids=budget.other_end_token_ids,
    )


def _budget_from_proto(message: common_pb2.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=message.max_tokens,
        end_token_id=message.end_token_id,
        other_end_token_ids=tuple(message.other_end_token_ids),
    )


def replay_to_proto(script: ReplayScript | None) -> common_pb2.ReplayScript | None:
    """A script as its message, None as None."""
    if script is None:
        return None
    return common_pb2.ReplayScript(
        token_ids=pack_ids(script.token_ids), tokens_per_step=script.tokens_per_step
    )


def replay_from_proto(message: common_pb2.ReplayScript) -> ReplayScript:
    """A message as a script."""
    return ReplayScript(
        token_ids=tuple(unpack_ids(message.token_ids, "replay.token_ids")),
        tokens_per_step=tuple(message.tokens_per_step) or (1,),
    )


def failure_to_proto(error: RequestError) -> common_pb2.Failure:
    """An error as a `Failure`."""
    return common_pb2.Failure(
        reason=int(error.reason),  # type: ignore[arg-type]  # enum values are ints on the wire
        message=error.message,
        field=error.field,
        is_retryable=error.outcome.is_retryable,
        retry_after_ms=error.retry_after_ms,
        may_go_on=error.may_go_on,
    )


def failure_from_proto(message: common_pb2.Failure) -> RequestError:
    """A `Failure` as an error; an unknown reason counts as INTERNAL."""
    return RequestError(
        _REASONS.get(message.reason, FailureReason.INTERNAL),
        message.message,
        field=message.field if message.HasField("field") else None,
        retry_after_ms=message.retry_after_ms if message.HasField("retry_after_ms") else None,
        may_go_on=message.may_go_on,
    )


def logprobs_to_proto(entries: Sequence[TokenLogprobs]) -> common_pb2.LogprobColumns | None:
    """Entries as columns, None when there are none."""
    if not entries:
        return None
    top_ids = array("I", (i for e in entries for i in e.top_token_ids))
    top_values = array("f", (v for e in entries for v in e.top_logprobs))
    return common_pb2.LogprobColumns(
        sampled_logprobs=array("f", (e.logprob for e in entries)).tobytes(),
        sampled_ranks=array("I", (e.rank for e in entries)).tobytes(),
        num_top_logprobs=[len(e.top_token_ids) for e in entries],
        top_token_ids=top_ids.tobytes(),
        top_logprobs=top_values.tobytes(),
    )


def logprobs_from_proto(message: common_pb2.LogprobColumns) -> list[TokenLogprobs]:
    """Columns as entries, lengths checked."""
    values = unpack_floats(message.sampled_logprobs, "sampled_logprobs")
    ranks = unpack_ids(message.sampled_ranks, "sampled_ranks")
    top_ids = unpack_ids(message.top_token_ids, "top_token_ids")
    top_values = unpack_floats(message.top_logprobs, "top_logprobs")
    check_columns(len(values), sampled_ranks=ranks, num_top_logprobs=message.num_top_logprobs)
    total = sum(message.num_top_logprobs)
    check_columns(total, top_token_ids=top_ids, top_logprobs=top_values)
    entries, start = [], 0
    for value, rank, count in zip(values, ranks, message.num_top_logprobs, strict=True):
        end = start + count
        entries.append(
            TokenLogprobs(
                logprob=value,
                rank=rank,
                top_token_ids=tuple(top_ids[start:end]),
                top_logprobs=tuple(top_values[start:end]),
            )
        )
        start = end
    return entries


def stats_to_proto(stats: SequenceStats) -> common_pb2.SequenceStats:
    """Stats as their message."""
    return common_pb2.SequenceStats(**{name: getattr(stats, name) for name in _STATS_FIELDS})


def stats_from_proto(message: common_pb2.SequenceStats) -> SequenceStats:
    """A message as stats."""
    return SequenceStats(**{name: getattr(message, name) for name in _STATS_FIELDS})


def load_to_proto(load: LoadSnapshot) -> common_pb2.LoadSnapshot:
    """A snapshot as its message."""
    fields = {name: getattr(load, name) for name in _LOAD_FIELDS}
    replicas = [replica_to_proto(one) for one in load.replicas]
    return common_pb2.LoadSnapshot(**fields | {"replicas": replicas})


def replica_to_proto(load: ReplicaLoad) -> common_pb2.ReplicaLoad:
    """The load of one replica as its message."""
    return common_pb2.ReplicaLoad(**{name: getattr(load, name) for name in _REPLICA_FIELDS})


def load_from_proto(message: common_pb2.LoadSnapshot) -> LoadSnapshot:
    """A message as a snapshot."""
    fields = {name: getattr(message, name) for name in _LOAD_FIELDS}
    positions = tuple(message.num_accepted_tokens_per_position)
    replicas = tuple(
        ReplicaLoad(**{name: getattr(one, name) for name in _REPLICA_FIELDS})
        for one in message.replicas
    )
    return LoadSnapshot(
        **fields | {"num_accepted_tokens_per_position": positions, "replicas": replicas}
    )


_REASONS = {int(reason): reason for reason in FailureReason}
_STATS_FIELDS = tuple(SequenceStats.__dataclass_fields__)
_LOAD_FIELDS = tuple(LoadSnapshot.__dataclass_fields__)
_REPLICA_FIELDS = tuple(ReplicaLoad.__dataclass_fields__)
