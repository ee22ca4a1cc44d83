"""What may enter; every refusal names its field."""

import dataclasses
import math

import pytest

from services.scheduler.admission import check_fit, check_submission
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceSubmit
from shared.constraint import MAX_CONSTRAINT_BYTES, Constraint, FormatKind, TextFormat
from shared.errors import FailureReason, RequestError
from shared.sampling import ReplayScript, SamplingSpec, ThinkingBudget
from tests.services.scheduler.builders import entry, limits, submission

SCRIPT = ReplayScript(token_ids=(1, 2))


def refusal(*entries: SequenceSubmit, is_replay: bool = False, **changes: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_submission(submission(*entries, **changes), limits(is_replay=is_replay))
    return caught.value


def test_an_ordinary_request_may_enter() -> None:
    check_submission(submission(entry(), entry(stream_id=1)), limits())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("num_logprobs", 5000),
        ("stop_token_ids", tuple(range(1025))),
        ("eos_token_ids", (50_000,)),
        ("stop_token_ids", (4_294_967_295,)),
    ],
)
def test_a_sampling_value_outside_its_range_is_named(field: str, value: object) -> None:
    error = refusal(sampling=dataclasses.replace(SamplingSpec(), **{field: value}))
    assert error.reason is FailureReason.INVALID_ARGUMENT
    assert error.field == field
    assert field in error.message


@pytest.mark.parametrize(
    "changes",
    [
        # As float32 rounds them, a little below the bound itself.
        {"top_p": 9.999999717180685e-10},
        {"repetition_penalty": 9.999999974752427e-07},
        {"stop_token_ids": (5,) * 5000, "eos_token_ids": (5, 6)},
        {"stop_token_ids": tuple(range(1024)), "eos_token_ids": (0, 1023)},
    ],
)
def test_values_at_their_bounds_may_enter(changes: dict[str, object]) -> None:
    check_submission(submission(sampling=dataclasses.replace(SamplingSpec(), **changes)), limits())


def test_no_more_logprobs_than_ids_can_be_asked_for() -> None:
    spec = SamplingSpec(num_logprobs=11)
    with pytest.raises(RequestError, match="num_logprobs is 11"):
        check_submission(submission(entry(2), sampling=spec), limits(vocab_size=10))


@pytest.mark.parametrize("size", [0, 1025, 2**32 - 1])
def test_a_script_emits_1_to_1024_tokens_per_step(size: int) -> None:
    script = ReplayScript(token_ids=(1, 2), tokens_per_step=(1, size))
    assert refusal(entry(replay=script), is_replay=True).field == "replay.tokens_per_step"


@pytest.mark.parametrize(
    ("bias", "field"),
    [((50_000, 1.0), "logit_bias_token_ids"), ((1, 101.0), "logit_bias_values")],
)
def test_a_wrong_logit_bias_is_named(bias: tuple[int, float], field: str) -> None:
    assert refusal(sampling=SamplingSpec(logit_bias=(bias,))).field == field


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(entry(0)).field == "prompt_token_ids"


def test_unknown_token_ids_are_refused() -> None:
    wrong = entry()
    wrong.prompt_token_ids[2] = 50_000
    error = refusal(wrong)
    assert error.field == "prompt_token_ids"
    assert "50000" in error.message
    assert refusal(entry(output=(60_000,))).field == "output_token_ids"


def test_a_resumed_sequence_must_have_tokens_left() -> None:
    check_submission(submission(entry(output=tuple(range(7)))), limits())
    assert refusal(entry(output=tuple(range(8)))).field == "output_token_ids"


@pytest.mark.parametrize("request_id", ["", "x" * 129, "ü" * 65])
def test_a_request_id_has_1_to_128_bytes(request_id: str) -> None:
    assert refusal(request_id=request_id).field == "request_id"


def test_priority_is_refused_by_name_and_not_ignored() -> None:
    error = refusal(priority=-1)
    assert error.reason is FailureReason.FEATURE_DISABLED
    assert error.field == "priority"


def test_priority_is_served_where_the_policy_heeds_it() -> None:
    check_submission(submission(priority=-1), limits(CoreConfig(policy="priority")))


def test_a_response_has_1_to_128_sequences() -> None:
    many = [entry(stream_id=n) for n in range(129)]
    assert refusal(*many).field == "sequences"
    with pytest.raises(RequestError, match="are 0"):
        check_submission(dataclasses.replace(submission(), sequences=()), limits())


def test_scripts_and_replay_workers_belong_together() -> None:
    check_submission(submission(entry(replay=SCRIPT)), limits(is_replay=True))
    assert refusal(entry(replay=SCRIPT)).reason is FailureReason.FEATURE_DISABLED
    assert refusal(entry(), is_replay=True).field == "replay"
    stuck = ReplayScript(token_ids=(1,), tokens_per_step=(1, 0))
    assert refusal(entry(replay=stuck), is_replay=True).field == "replay.tokens_per_step"
    wild = ReplayScript(token_ids=(50_000,))
    assert refusal(entry(replay=wild), is_replay=True).field == "replay.token_ids"


def test_the_context_length_is_refused_by_one_token_with_both_numbers() -> None:
    check_fit(63, limits())
    with pytest.raises(RequestError) as caught:
        check_fit(64, limits())
    assert caught.value.reason is FailureReason.CONTEXT_LENGTH_EXCEEDED
    assert "64 tokens" in caught.value.message
    assert "context length is 64" in caught.value.message


def test_what_the_pool_can_never_hold_is_refused() -> None:
    small = limits(num_blocks=4)
    check_fit(11, small)
    with pytest.raises(RequestError) as caught:
        check_fit(12, small)
    assert caught.value.reason is FailureReason.KV_CAPACITY_EXCEEDED
    assert "4 KV blocks, the worker has 3" in caught.value.message


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingSpec(allowed_token_ids=(50_000,)), "allowed_token_ids"),
        (SamplingSpec(allowed_token_ids=(1,) * 8193), "allowed_token_ids"),
        (SamplingSpec(bad_words=((1, 50_000),)), "bad_words"),
        (SamplingSpec(bad_words=((),)), "bad_words"),
        (SamplingSpec(bad_words=((1,) * 65,)), "bad_words"),
        (SamplingSpec(bad_words=((1,),) * 257), "bad_words"),
        (
            SamplingSpec(thinking_budget=ThinkingBudget(max_tokens=1, end_token_id=50_000)),
            "thinking_budget",
        ),
    ],
)
def test_wrong_limits_of_tokens_are_named(sampling: SamplingSpec, field: str) -> None:
    assert refusal(sampling=sampling).field == field


def test_a_constraint_is_bounded_in_size_and_no_matter_of_a_replay_worker() -> None:
    large = TextFormat(kind=FormatKind.REGEX, text="a" * (MAX_CONSTRAINT_BYTES + 1))
    found = refusal(sampling=SamplingSpec(constraint=Constraint(format=large)))
    assert found.field == "constraint"
    assert "at most" in found.message
    small = SamplingSpec(constraint=Constraint(format=TextFormat(kind=FormatKind.JSON_OBJECT)))
    check_submission(submission(sampling=small), limits())
    with pytest.raises(RequestError) as caught:
        check_submission(submission(sampling=small), limits(is_replay=True))
    assert caught.value.reason is FailureReason.FEATURE_DISABLED
    unknown = Constraint(format=small.constraint.format, start_after_token_id=50_000)  # type: ignore[union-attr]
    assert refusal(sampling=SamplingSpec(constraint=unknown)).field == "constraint"
