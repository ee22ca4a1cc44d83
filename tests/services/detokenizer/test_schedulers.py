"""Several schedulers as one: requests are placed, and a lost scheduler costs nobody a token."""

import re
from dataclasses import replace
from typing import Any

import pytest

from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from tests.services.detokenizer.fake_client import MAX_TOKENS, Asker, Fleet, ask, request

ONE, MANY = [5], [5, 6, 7]


def place_of(fleet: Fleet) -> int:
    """The scheduler with the only request."""
    (found,) = [n for n, c in enumerate(fleet.clients) if c.running or c.waiting]
    return found


def finish(fleet: Fleet) -> None:
    for _ in range(40):
        fleet.time += 0.25
        fleet.step()
    assert not fleet.num_live
    assert not fleet.schedulers.num_waiting
    for peer in fleet.schedulers.peers:
        assert (peer.credit.num_sequences, peer.credit.num_tokens) == (0, 0)


# -- placing ---------------------------------------------------------------------------------------


def test_the_choices_of_a_request_stay_together_and_equal_starts_meet() -> None:
    fleet = Fleet(3)
    prompt = list(range(20))
    for number in range(3):
        ask(fleet, MANY, prompt=[*prompt, number], name=str(number))
    assert sorted(len(client.submits) for client in fleet.clients) == [0, 0, 3]
    assert all(len(s.sequences) == 3 for client in fleet.clients for s in client.submits)
    finish(fleet)


def test_two_detokenizers_send_requests_that_begin_alike_to_the_same_scheduler() -> None:
    """Told of the schedulers in another order, and of requests with other ends."""
    one, other = Fleet(4), Fleet(4)
    peers = other.schedulers.peers
    for number, peer in enumerate(peers):
        peer.address = f"unix:/s{3 - number}"
    for number in range(20):
        start = [number] * 16
        ask(one, ONE, prompt=start, name=str(number))
        ask(other, MANY, prompt=[*start, 7, 7, 7], name=str(number))
        assert place_of(one) == 3 - place_of(other)
        finish(one)
        finish(other)
        for fleet in (one, other):
            for client in range(4):
                fleet.tell(client)


def test_a_burst_is_spread_before_any_snapshot_tells_of_it() -> None:
    fleet = Fleet(2)
    for number in range(40):
        ask(fleet, ONE, prompt=[1] * 8, name=str(number))
    counts = sorted(len(client.submits) for client in fleet.clients)
    assert counts[0] >= 10, "1.25 times the mean, and four of 64 seats: 29 at most"
    finish(fleet)


@pytest.mark.parametrize("change", [{"is_worker_ready": False}, {"is_draining": True}])
def test_one_that_cannot_serve_takes_nothing(change: dict[str, bool]) -> None:
    fleet = Fleet(2)
    fleet.tell(0, **change)
    for number in range(8):
        ask(fleet, ONE, prompt=[number] * 8, name=str(number))
    assert [len(client.submits) for client in fleet.clients] == [0, 8]
    finish(fleet)


def test_where_none_is_ready_one_that_may_be_so_soon_is_asked() -> None:
    fleet = Fleet(2)
    fleet.tell(0, is_worker_ready=False)
    fleet.tell(1, is_draining=True)
    ask(fleet, ONE)
    assert place_of(fleet) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_without_any_scheduler_a_request_is_refused_at_once(count: int) -> None:
    fleet = Fleet(count)
    for number in range(count):
        fleet.lose(number)
    with pytest.raises(RequestError, match=r"cannot be reached|none of 3") as caught:
        ask(fleet, ONE)
    assert caught.value.reason is FailureReason.UPSTREAM_LOST
    assert caught.value.retry_after_ms
    assert not fleet.num_live


@pytest.mark.parametrize(
    "reason", [FailureReason.QUEUE_FULL, FailureReason.DRAINING, FailureReason.UPSTREAM_LOST]
)
def test_a_refusal_that_is_about_the_scheduler_sends_the_request_to_the_next(
    reason: FailureReason,
) -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, MANY)
    first = place_of(fleet)
    fleet.clients[first].refusal = RequestError(reason, "not now")
    finish(fleet)
    asker.check_whole(MAX_TOKENS)
    assert asker.resumed == [], "nothing was lost"


def test_a_refusal_of_all_is_the_verdict() -> None:
    fleet = Fleet(2)
    for client in fleet.clients:
        client.refusal = RequestError(FailureReason.QUEUE_FULL, "full", retry_after_ms=250)
    asker, _ = ask(fleet, MANY)
    finish(fleet)
    (refusal,) = asker.verdicts.values()
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_ms) == (FailureReason.QUEUE_FULL, 250)
    assert [len(client.submits) for client in fleet.clients] == [1, 1]


def test_a_full_queue_is_told_and_not_that_another_scheduler_is_not_ready() -> None:
    fleet = Fleet(2)
    fleet.tell(1, is_worker_ready=False)
    fleet.clients[0].refusal = RequestError(FailureReason.QUEUE_FULL, "full", retry_after_ms=250)
    fleet.clients[1].refusal = RequestError(FailureReason.UPSTREAM_LOST, "no worker")
    asker, _ = ask(fleet, ONE)
    finish(fleet)
    assert asker.verdicts == {0: fleet.clients[0].refusal}


def test_a_refusal_that_is_about_the_request_is_asked_nowhere_else() -> None:
    fleet = Fleet(2)
    for client in fleet.clients:
        client.refusal = RequestError(FailureReason.INVALID_ARGUMENT, "bad", field="top_p")
    asker, _ = ask(fleet, ONE)
    finish(fleet)
    assert asker.verdicts[0] is not None
    assert asker.verdicts[0].field == "top_p"
    assert sum(len(client.submits) for client in fleet.clients) == 1


# -- losses ----------------------------------------------------------------------------------------


def test_what_ran_goes_on_elsewhere_behind_the_tokens_that_came() -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, MANY, timeout_ms=9_000, cache_salt="salt", tenant_id="t", priority=3)
    first = place_of(fleet)
    for _ in range(4):
        fleet.step()
    fleet.time = 2.0
    fleet.lose(first)
    fleet.step()
    assert place_of(fleet) == 1 - first
    (again,) = fleet.clients[1 - first].submits
    assert [len(s.output_token_ids) // 4 for s in again.sequences] == [4, 4, 4]
    assert [(s.index, s.seed) for s in again.sequences] == [(0, 5), (1, 6), (2, 7)]
    assert again.request_id == "r~1", "its own id: an earlier leg may not have ended yet"
    assert (again.timeout_ms, again.cache_salt, again.tenant_id, again.priority) == (
        7_000,
        "salt",
        "t",
        3,
    )
    assert asker.resumed == [(0, 4), (1, 4), (2, 4)]
    finish(fleet)
    asker.check_whole(MAX_TOKENS)
    assert fleet.loads[-1].num_resubmissions_total == 3
    assert fleet.loads[-1].num_scheduler_losses_total == 1
    assert fleet.loads[-1].num_unresumed_total == 0


def test_the_only_scheduler_is_waited_for() -> None:
    fleet = Fleet(1)
    asker, _ = ask(fleet, ONE)
    fleet.step(3)
    fleet.lose(0)
    assert fleet.reached == [True, False]
    fleet.step()
    fleet.time = 4.0
    fleet.start(0, is_worker_ready=False)
    fleet.step()
    assert fleet.schedulers.num_waiting == 1, "its worker is not there yet"
    fleet.tell(0)
    finish(fleet)
    asker.check_whole(MAX_TOKENS)


def test_what_was_not_admitted_yet_is_asked_elsewhere() -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, MANY)
    fleet.lose(place_of(fleet))
    finish(fleet)
    asker.check_whole(MAX_TOKENS)
    assert list(asker.verdicts.values()) == [None] * 3


def test_only_what_has_not_ended_goes_on() -> None:
    fleet = Fleet(2)
    asker, names = ask(fleet, MANY)
    first = place_of(fleet)
    fleet.step(2)
    fleet.schedulers.abort(names[1], AbortReason.STOP_STRING, 2)
    assert fleet.clients[first].aborts == [(2, AbortReason.STOP_STRING, 2)]
    fleet.lose(first)
    fleet.step()
    (again,) = fleet.clients[1 - first].submits
    assert [s.index for s in again.sequences] == [0, 2]
    finish(fleet)
    assert set(asker.ends) == {0, 2}


def test_a_scheduler_that_stops_hands_its_sequences_over() -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, MANY)
    first = place_of(fleet)
    fleet.step(2)
    stopping = RequestError(FailureReason.DRAINING, "the scheduler is stopping")
    fleet.clients[first].fail_all(stopping)
    fleet.clients[first].refusal = stopping
    finish(fleet)
    asker.check_whole(MAX_TOKENS)
    assert [len(client.submits) for client in fleet.clients] == [1, 1]


@pytest.mark.parametrize(
    "reason", [FailureReason.NUMERICAL_ERROR, FailureReason.UPSTREAM_LOST, FailureReason.INTERNAL]
)
def test_an_end_that_the_scheduler_gave_is_an_end(reason: FailureReason) -> None:
    """Also where its workers died of the sequence: they would do so elsewhere."""
    fleet = Fleet(2)
    asker, _ = ask(fleet, ONE)
    fleet.step()
    fleet.clients[place_of(fleet)].fail_all(RequestError(reason, "x"))
    finish(fleet)
    end = asker.ends[0]
    assert isinstance(end, RequestError)
    assert end.reason is reason


def gone() -> RequestError:
    """The end of a sequence at a scheduler whose worker did not come back."""
    return RequestError(FailureReason.UPSTREAM_LOST, "the worker is lost", may_go_on=True)


def test_a_scheduler_without_a_worker_hands_over_to_one_that_has_one() -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, MANY)
    first = place_of(fleet)
    fleet.step(2)
    fleet.tell(first, is_worker_ready=False)
    fleet.clients[first].fail_all(gone())
    finish(fleet)
    asker.check_whole(MAX_TOKENS)


@pytest.mark.parametrize("other", [{"is_worker_ready": False}, {"model_digest": "other"}])
def test_where_no_other_can_go_on_the_clients_hear_of_it_at_once(other: dict[str, Any]) -> None:
    fleet = Fleet(2)
    asker, _ = ask(fleet, ONE)
    first = place_of(fleet)
    fleet.step()
    fleet.tell(first, is_worker_ready=False)
    fleet.tell(1 - first, **other)
    fleet.clients[first].fail_all(gone())
    end = asker.ends[0]
    assert isinstance(end, RequestError)
    assert end.message == "the worker is lost"


def test_with_resumption_switched_off_a_good_bye_is_an_end() -> None:
    fleet = Fleet(2, wait_s=0.0)
    asker, _ = ask(fleet, ONE)
    fleet.step()
    stopping = RequestError(FailureReason.DRAINING, "the scheduler is stopping")
    fleet.clients[place_of(fleet)].fail_all(stopping)
    assert asker.ends == {0: stopping}


def test_an_abort_in_the_gap_is_heard() -> None:
    fleet = Fleet(1)
    asker, (name,) = ask(fleet, ONE)
    fleet.step(2)
    fleet.lose(0)
    fleet.schedulers.abort(name, AbortReason.CANCELLED)
    fleet.start(0)
    finish(fleet)
    assert asker.ends == {}
    assert len(fleet.clients[0].submits) == 1


def test_another_model_does_not_go_on_with_it() -> None:
    fleet = Fleet(2, wait_s=5.0)
    asker, _ = ask(fleet, ONE)
    first = place_of(fleet)
    fleet.tell(1 - first, model_digest="other")
    fleet.step(2)
    fleet.lose(first)
    fleet.step()
    assert not fleet.clients[1 - first].submits
    fleet.time = 6.0
    finish(fleet)
    end = asker.ends[0]
    assert isinstance(end, RequestError)
    assert end.reason is FailureReason.UPSTREAM_LOST


@pytest.mark.parametrize(
    ("wait_s", "text"), [(0.0, "was lost$"), (3.0, "lost, and none took .* within 3 s$")]
)
def test_the_wait_for_a_scheduler_is_bounded(wait_s: float, text: str) -> None:
    fleet = Fleet(1, wait_s=wait_s)
    asker, _ = ask(fleet, MANY)
    fleet.step()
    fleet.lose(0)
    fleet.time = 0.99 * wait_s
    fleet.step()
    assert bool(asker.ends) == (not wait_s)
    fleet.time = wait_s
    fleet.step()
    (end,) = asker.ends.values()
    assert isinstance(end, RequestError)
    assert end.reason is FailureReason.UPSTREAM_LOST
    assert end.retry_after_ms
    assert re.search(text, end.message)
    assert not fleet.num_live
    assert fleet.loads[-1].num_unresumed_total == 3


def test_the_number_of_losses_is_bounded() -> None:
    fleet = Fleet(2, max_losses=2)
    asker, _ = ask(fleet, ONE)
    for _ in range(3):
        fleet.step()
        lost = place_of(fleet)
        fleet.lose(lost)
        fleet.start(lost)
    fleet.step()
    end = asker.ends[0]
    assert isinstance(end, RequestError)
    assert end.message == "the scheduler was lost 3 times"
    assert len(asker.tokens[0]) == 3
    finish(fleet)


def test_who_is_refused_by_all_asks_again_later_and_is_told_why_in_the_end() -> None:
    fleet = Fleet(2, wait_s=10.0)
    asker, _ = ask(fleet, ONE)
    first = place_of(fleet)
    fleet.step()
    fleet.clients[1 - first].refusal = RequestError(FailureReason.QUEUE_FULL, "the queue is full")
    fleet.lose(first)
    for _ in range(102):
        fleet.time += 0.1
        fleet.step()
    # After 0.1, 0.2, 0.4, ... seconds, and then every two.
    assert 5 <= len(fleet.clients[1 - first].submits) <= 12
    end = asker.ends[0]
    assert isinstance(end, RequestError)
    assert end.message.endswith("within 10 s: the queue is full")


def test_who_is_refused_at_first_goes_on_once_there_is_room() -> None:
    fleet = Fleet(1)
    asker, _ = ask(fleet, ONE)
    fleet.step()
    fleet.lose(0)
    fleet.start(0)
    fleet.clients[0].refusal = RequestError(FailureReason.QUEUE_FULL, "the queue is full")
    fleet.step()
    fleet.clients[0].refusal = None
    fleet.time = 1.0
    finish(fleet)
    asker.check_whole(MAX_TOKENS)


def test_deadlines_run_on_in_the_gap() -> None:
    fleet = Fleet(1)
    late, _ = ask(fleet, ONE, timeout_ms=2_000)
    first, _ = ask(fleet, ONE, name="first", first_token_timeout_ms=1_000)
    fleet.clients[0].answer()
    fleet.lose(0)
    fleet.time = 3.0
    fleet.start(0)
    fleet.step()
    for asker, text in ((late, "the time limit is over"), (first, "no first token")):
        end = asker.ends[0]
        assert isinstance(end, RequestError)
        assert end.reason is FailureReason.DEADLINE_EXCEEDED
        assert end.message.startswith(text)
    assert not fleet.num_live


@pytest.mark.parametrize("count", [1, 2])
def test_deadlines_are_kept_while_no_scheduler_is_there(count: int) -> None:
    """Not only once one is back, and not as a loss."""
    fleet = Fleet(count)
    late, _ = ask(fleet, ONE, timeout_ms=2_000)
    first, _ = ask(fleet, MANY, name="first", first_token_timeout_ms=1_000)
    going, _ = ask(fleet, ONE, name="going", first_token_timeout_ms=1_000)
    for client in fleet.clients:
        client.answer()
    for number in range(count):
        fleet.lose(number)
    for fleet.time, num_ended in ((0.9, 0), (1.0, 2), (1.9, 2), (2.0, 3)):
        fleet.schedulers.resume_waiting()
        assert sum(map(bool, (late.ends, first.ends, going.ends))) == num_ended
    for asker, text in ((late, "2000 ms"), (first, "1000 ms"), (going, "1000 ms")):
        end = next(iter(asker.ends.values()))
        assert isinstance(end, RequestError)
        assert end.reason is FailureReason.DEADLINE_EXCEEDED
        assert end.message.endswith(text)
    assert not fleet.num_live
    assert not fleet.schedulers.num_waiting


def test_a_first_token_that_came_before_the_loss_is_no_matter_of_time() -> None:
    fleet = Fleet(1)
    asker, _ = ask(fleet, ONE, first_token_timeout_ms=1_000)
    fleet.step(2)
    fleet.lose(0)
    fleet.time = 5.0
    fleet.schedulers.resume_waiting()
    assert not asker.ends
    fleet.start(0)
    finish(fleet)
    asker.check_whole(MAX_TOKENS)


def test_a_bug_in_one_request_leaves_the_others_going_on() -> None:
    fleet = Fleet(1)
    bad, good = Asker(ONE), Asker(ONE)
    submit = request(ONE)
    fleet.schedulers.submit(submit, bad)
    fleet.schedulers.submit(replace(submit, request_id="good"), good)
    fleet.step()
    fleet.lose(0)
    journey = next(iter(fleet.schedulers._waiting))
    journey.tracks[0].ids = None  # type: ignore[assignment]  # something that must not be
    fleet.start(0)
    finish(fleet)
    good.check_whole(MAX_TOKENS)
    end = bad.ends[0]
    assert isinstance(end, RequestError)
    assert end.reason is FailureReason.INTERNAL


async def test_a_reset_reaches_all_and_says_whom_it_did_not() -> None:
    fleet = Fleet(2)
    assert await fleet.schedulers.reset_cache() == 6
    fleet.lose(1)
    with pytest.raises(RequestError, match="cannot be reached"):
        await fleet.schedulers.reset_cache()


async def test_a_scheduler_at_two_addresses_is_one(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(2)
    run = "0.1"
    fleet.tell(0, num_steps_total=10)
    for _ in range(2):
        fleet.tell(1, instance_id=run, num_steps_total=10)
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert lines == [
        "the scheduler at unix:/s1 is the one at unix:/s0, left out: give each one address"
    ]
    for number in range(8):
        ask(fleet, ONE, prompt=[number] * 8, name=str(number))
    assert [len(client.submits) for client in fleet.clients] == [8, 0]
    assert (fleet.loads[-1].num_steps_total, fleet.loads[-1].num_reached_schedulers) == (10, 1)
    assert await fleet.schedulers.reset_cache() == 3
    fleet.step()
    fleet.lose(0)
    fleet.tell(1, instance_id=run, num_steps_total=12)
    assert (fleet.loads[-1].num_steps_total, fleet.loads[-1].num_reached_schedulers) == (12, 1)
    finish(fleet)
    assert len(fleet.clients[1].submits) == 8, "the other address serves where the first is lost"
