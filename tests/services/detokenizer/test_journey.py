"""A request over several schedulers: its counts and times are those of the whole way."""

from array import array
from typing import Any

import pytest

from services.detokenizer.journey import MAX_ID_BYTES, Journey, Leg, Track
from services.detokenizer.messages import SequenceFinished, SequenceSpec, TokenSubmit
from shared.endings import FinishReason
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec, SequenceStats
from shared.wire import pack_ids
from tests.services.detokenizer.fake_client import Asker


class Owner:
    """Whoever gives sequences to schedulers; remembers what it is told."""

    def __init__(self) -> None:
        self.time = 0.0
        self.told: list[str] = []

    def now(self) -> float:
        return self.time

    def leg_admitted(self, leg: Leg) -> None:
        self.told.append("admitted")

    def leg_refused(self, leg: Leg, refusal: RequestError) -> None:
        self.told.append("refused")
        for track in leg.tracks:
            track.leave()

    def goes_on(self, leg: Leg, error: RequestError) -> bool:
        return error.reason is FailureReason.DRAINING

    def track_lost(self, leg: Leg, track: Track) -> None:
        self.told.append(f"lost {track.position}")

    def track_over(self, track: Track) -> None:
        self.told.append(f"over {track.position}")
        track.leg, track.is_over = None, True


def journey(count: int = 1, **fields: Any) -> tuple[Journey, Asker]:
    asker = Asker(list(range(count)))
    values: dict[str, Any] = {
        "request_id": "r",
        "sequences": tuple(
            SequenceSpec(index=i, prompt_token_ids=pack_ids([1, 2, 3]), seed=i)
            for i in range(count)
        ),
        "sampling": SamplingSpec(max_tokens=9, num_prompt_logprobs=1),
    }
    return Journey(TokenSubmit(**(values | fields)), asker, 0.0), asker


def lose(way: Journey, leg: Leg) -> None:
    for track in leg.tracks:
        track.leave()
    way.lose(0.0, 1.0)


def finished(**stats: int) -> SequenceFinished:
    return SequenceFinished(
        reason=FinishReason.LENGTH, stop_token_id=None, stats=SequenceStats(**stats)
    )


def test_usage_of_a_resumed_sequence_is_that_of_one_that_was_never_lost() -> None:
    """Prompt tokens that the second scheduler found cached were computed by the first."""
    way, asker = journey()
    owner = Owner()
    first = Leg(way, way.tracks, 0, owner, 0.0)
    first.on_verdict(0, None)
    owner.time = 1.0
    first.on_start(0, SequenceStats(num_cached_tokens=2, queue_us=10, prefill_us=20))
    first.on_drafts(0, 4, 3)
    first.on_tokens(0, 0, [7, 8, 9, 10], None)
    lose(way, first)
    owner.time = 5.0
    second = Leg(way, way.waiting, 1, owner, 5.0)
    second.on_verdict(0, None)
    second.on_start(0, SequenceStats(num_cached_tokens=99, queue_us=99, prefill_us=99))
    second.on_drafts(0, 2, 1)
    second.on_tokens(0, 4, [11, 12], None)
    owner.time = 6.0
    stats = {"num_cached_tokens": 99, "num_drafted_tokens": 2, "num_accepted_tokens": 1}
    second.on_end(0, finished(num_output_tokens=6, decode_us=1, **stats))
    assert list(asker.tokens[0]) == [7, 8, 9, 10, 11, 12]
    assert asker.starts[0].num_cached_tokens == 2
    assert asker.drafts[0] == (6, 4)
    end = asker.ends[0]
    assert isinstance(end, SequenceFinished)
    assert end.stats == SequenceStats(
        num_cached_tokens=2,
        queue_us=10,
        prefill_us=20,
        decode_us=5_000_000,
        num_output_tokens=6,
        num_drafted_tokens=6,
        num_accepted_tokens=4,
    )


def test_a_sequence_lost_before_its_first_token_has_waited_all_the_time() -> None:
    way, asker = journey()
    owner = Owner()
    lose(way, Leg(way, way.tracks, 0, owner, 0.0))
    owner.time = 2.0
    second = Leg(way, way.waiting, 1, owner, 2.0)
    second.on_verdict(0, None)
    second.on_start(0, SequenceStats(num_cached_tokens=1, queue_us=5, prefill_us=7))
    assert asker.starts[0] == SequenceStats(num_cached_tokens=1, queue_us=2_000_005, prefill_us=7)
    assert asker.resumed == [(0, 0)]


def test_an_undisturbed_sequence_is_told_what_its_scheduler_says() -> None:
    way, asker = journey()
    leg = Leg(way, way.tracks, 0, Owner(), 0.0)
    leg.on_verdict(0, None)
    told = finished(num_output_tokens=1, decode_us=3)
    leg.on_end(0, told)
    assert asker.ends == {0: told}
    assert asker.resumed == []


def test_what_is_left_is_the_prompt_the_tokens_so_far_and_the_time() -> None:
    way, _ = journey(2, timeout_ms=5_000, first_token_timeout_ms=3_000)
    whole = way.left(way.tracks, 0.0)
    assert whole == way.submit
    leg = Leg(way, way.tracks, 0, Owner(), 0.0)
    leg.on_tokens(0, 0, [7, 8], None)
    lose(way, leg)
    both = way.left(way.waiting, 2.0)
    assert [s.output_token_ids for s in both.sequences] == [pack_ids([7, 8]), b""]
    assert both.request_id == "r~1"
    assert (both.timeout_ms, both.first_token_timeout_ms) == (3_000, 1_000)
    assert both.sampling == way.submit.sampling
    one = way.left(way.waiting[:1], 2.0)
    assert one.first_token_timeout_ms == 0, "it has come"
    assert one.sampling.num_prompt_logprobs is None, "they were told before it"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ("timeout_ms", "the time limit is over after"),
        ("first_token_timeout_ms", "no first token within"),
    ],
)
def test_nothing_is_left_once_the_time_is_over(limit: str, text: str) -> None:
    way, _ = journey(**{limit: 1_500})
    with pytest.raises(RequestError, match=f"{text} 1500 ms") as caught:
        way.left(way.tracks, 1.7)
    assert caught.value.reason is FailureReason.DEADLINE_EXCEEDED


def test_a_request_that_was_going_on_already_counts_its_tokens_from_there() -> None:
    """A frontend resumed it: it comes with output ids."""
    spec = SequenceSpec(index=0, prompt_token_ids=pack_ids([1]), output_token_ids=pack_ids([5, 6]))
    way, _ = journey(sequences=(spec,))
    assert way.tracks[0].ids == array("I", [5, 6])


def test_labels_of_legs_differ_and_stay_within_the_limit_of_schedulers() -> None:
    way, _ = journey(request_id="ä" * 64)
    assert way.label == "ä" * 64
    Leg(way, way.tracks, 0, Owner(), 0.0)
    assert way.label == "ä" * (MAX_ID_BYTES // 2) + "~1"
    assert len(way.label.encode()) <= 128


def test_what_a_request_brings_counts_a_shared_prompt_once() -> None:
    way, _ = journey(3)
    assert way.newcomer(way.tracks).num_sequences == 3
    assert way.newcomer(way.tracks).num_tokens == 3
    Leg(way, way.tracks, 0, Owner(), 0.0).on_tokens(1, 0, [7, 8], None)
    assert way.newcomer(way.tracks).num_tokens == 5


def test_a_refusal_is_told_once_and_a_good_bye_is_a_loss() -> None:
    way, asker = journey(2)
    owner = Owner()
    leg = Leg(way, way.tracks, 0, owner, 0.0)
    full = RequestError(FailureReason.QUEUE_FULL, "full")
    leg.on_verdict(0, full)
    leg.on_verdict(1, full)
    assert owner.told == ["refused"]
    leg = Leg(way, way.tracks, 1, owner, 0.0)
    leg.on_verdict(0, None)
    leg.on_verdict(1, None)
    leg.on_end(0, RequestError(FailureReason.DRAINING, "stopping"))
    leg.on_end(1, RequestError(FailureReason.NUMERICAL_ERROR, "not finite"))
    assert owner.told == ["refused", "admitted", "lost 0", "over 1"]
    assert list(asker.ends) == [1]


def test_pauses_between_rounds_of_refusals_grow_to_two_seconds() -> None:
    way, _ = journey()
    way.lose(0.0, 30.0)
    pauses, now = [], 0.0
    for _ in range(7):
        way.refused_by = {0}
        way.ask_later(now)
        pauses.append(round(way.not_before - now, 3))
        now = way.not_before
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    way.ask_later(now + 5.0)
    assert way.not_before == now, "nobody refused it: whoever comes may take it"
