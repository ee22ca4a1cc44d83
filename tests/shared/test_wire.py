import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.glm.v1 import common_pb2
from shared import wire
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

uint32s = st.integers(0, 2**32 - 1)
floats = st.floats(-100, 100, width=32)


@given(st.lists(uint32s))
def test_ids_survive_the_wire_as_little_endian_uint32(ids: list[int]) -> None:
    data = wire.pack_ids(ids)
    assert data == struct.pack(f"<{len(ids)}I", *ids)
    assert list(wire.unpack_ids(data, "x")) == ids


@pytest.mark.parametrize("unpack", [wire.unpack_ids, wire.unpack_floats])
def test_a_ragged_column_is_refused_by_its_name(unpack: Callable[[bytes, str], object]) -> None:
    with pytest.raises(RequestError, match="prompt_token_ids") as caught:
        unpack(b"12345", "prompt_token_ids")
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT
    assert caught.value.field == "prompt_token_ids"


@given(
    st.builds(
        SamplingSpec,
        temperature=floats,
        top_k=uint32s,
        top_p=floats,
        min_p=floats,
        presence_penalty=floats,
        frequency_penalty=floats,
        repetition_penalty=floats,
        seed=st.integers(0, 2**64 - 1),
        num_logprobs=st.none() | st.integers(0, 20),
        max_tokens=uint32s,
        min_tokens=uint32s,
        eos_token_ids=st.lists(uint32s).map(tuple),
        stop_token_ids=st.lists(uint32s).map(tuple),
        ignore_eos=st.booleans(),
        logit_bias=st.lists(st.tuples(uint32s, floats)).map(tuple),
        num_prompt_logprobs=st.none() | uint32s,
        allowed_token_ids=st.lists(uint32s).map(tuple),
        bad_words=st.lists(st.lists(uint32s).map(tuple)).map(tuple),
        thinking_budget=st.none()
        | st.builds(
            ThinkingBudget,
            max_tokens=uint32s,
            end_token_id=uint32s,
            other_end_token_ids=st.lists(uint32s).map(tuple),
        ),
    )
)
def test_a_sampling_spec_survives_the_wire(spec: SamplingSpec) -> None:
    data = wire.sampling_to_proto(spec).SerializeToString()
    assert wire.sampling_from_proto(common_pb2.SamplingParams.FromString(data)) == spec


def test_bias_columns_of_unequal_length_are_refused() -> None:
    message = common_pb2.SamplingParams(logit_bias_token_ids=[1, 2], logit_bias_values=[1.0])
    with pytest.raises(RequestError, match="logit_bias_values"):
        wire.sampling_from_proto(message)


def test_a_replay_script_survives_and_defaults_to_one_token_per_step() -> None:
    script = ReplayScript(token_ids=(5, 6), tokens_per_step=(1, 3))
    message = wire.replay_to_proto(script)
    assert message is not None
    assert wire.replay_from_proto(message) == script
    assert wire.replay_from_proto(common_pb2.ReplayScript()).tokens_per_step == (1,)
    assert wire.replay_to_proto(None) is None


@pytest.mark.parametrize("reason", list(FailureReason))
@pytest.mark.parametrize("field", [None, "messages[0].role"])
@pytest.mark.parametrize("retry", [None, 0, 900])
def test_a_failure_survives_the_wire(
    reason: FailureReason, field: str | None, retry: int | None
) -> None:
    error = RequestError(reason, "why", field=field, retry_after_ms=retry)
    back = wire.failure_from_proto(wire.failure_to_proto(error))
    facts = (back.reason, back.message, back.field, back.retry_after_ms)
    assert facts == (reason, "why", field, retry)
    assert not back.may_go_on
    error = RequestError(reason, "why", may_go_on=True)
    assert wire.failure_from_proto(wire.failure_to_proto(error)).may_go_on


def test_an_unknown_reason_counts_as_internal() -> None:
    message = common_pb2.Failure()
    message.ParseFromString(b"\x08\x63")  # field 1 = 99, as a newer peer would send it
    assert wire.failure_from_proto(message).reason is FailureReason.INTERNAL


entries = st.builds(
    lambda logprob, rank, top: TokenLogprobs(
        logprob=logprob,
        rank=rank,
        top_token_ids=tuple(t for t, _ in top),
        top_logprobs=tuple(v for _, v in top),
    ),
    floats,
    uint32s,
    st.lists(st.tuples(uint32s, floats), max_size=4),
)


@given(st.lists(entries, min_size=1))
def test_logprobs_survive_the_wire(values: list[TokenLogprobs]) -> None:
    message = wire.logprobs_to_proto(values)
    assert message is not None
    assert wire.logprobs_from_proto(message) == values


def test_no_logprobs_are_no_columns() -> None:
    assert wire.logprobs_to_proto([]) is None


@pytest.mark.parametrize("name", ["sampled_ranks", "top_token_ids", "top_logprobs"])
def test_logprob_columns_of_unequal_length_are_refused(name: str) -> None:
    message = wire.logprobs_to_proto(
        [TokenLogprobs(logprob=-1.0, rank=1, top_token_ids=(3,), top_logprobs=(-1.0,))]
    )
    assert message is not None
    setattr(message, name, b"")
    with pytest.raises(RequestError):
        wire.logprobs_from_proto(message)


def test_stats_and_load_survive_the_wire() -> None:
    stats = SequenceStats(num_prompt_tokens=3, queue_us=2**40, num_preemptions=1)
    assert wire.stats_from_proto(wire.stats_to_proto(stats)) == stats
    load = LoadSnapshot(
        num_running=2,
        is_worker_ready=True,
        num_steps_total=2**40,
        num_accepted_tokens_per_position=(2**40, 3),
        replicas=(ReplicaLoad(is_ready=True, num_steps_total=2**40), ReplicaLoad(num_running=2)),
    )
    assert wire.load_from_proto(wire.load_to_proto(load)) == load
