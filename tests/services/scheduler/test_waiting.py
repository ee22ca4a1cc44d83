"""The order of the queue: lanes of tenants, those that ran before, priorities with ageing."""

from services.scheduler.limits import CoreConfig
from services.scheduler.policy import Policy
from services.scheduler.sequence import Sequence
from services.scheduler.waiting import WaitingQueue
from tests.services.scheduler.builders import entry, sequence


def queue(**config: object) -> WaitingQueue:
    return WaitingQueue(Policy(CoreConfig(**config)))


def add(
    waiting: WaitingQueue, *, at: float = 0.0, tenant: str = "", priority: int = 0, size: int = 5
) -> Sequence:
    found = sequence(size, arrived_at=at)
    found.request.tenant_id, found.request.priority = tenant, priority
    waiting.policy.shares.enter(tenant)
    waiting.add(found, at)
    return found


def order(waiting: WaitingQueue, now: float = 0.0) -> list[Sequence]:
    return waiting.candidates(now, 99)


def test_order_is_that_of_arrival_and_those_that_ran_come_first() -> None:
    waiting = WaitingQueue()
    first, second = add(waiting), add(waiting, at=1.0)
    preempted = sequence(arrived_at=2.0)
    preempted.admission = 1
    waiting.add(preempted, 2.0)
    assert order(waiting, 2.0) == [preempted, first, second]
    assert waiting.head(2.0) is preempted


def test_one_that_ran_at_another_scheduler_comes_before_newcomers_too() -> None:
    waiting = WaitingQueue()
    newcomer = add(waiting, at=1.0)
    resumed = Sequence(
        newcomer.request, newcomer.outlet, entry(output=(9,)), newcomer.sampling, arrived_at=2.0
    )
    waiting.add(resumed, 2.0)
    assert order(waiting, 2.0) == [resumed, newcomer]
    waiting.remove(resumed)
    assert order(waiting, 2.0) == [newcomer]


def test_those_that_ran_come_in_the_order_of_their_arrival_however_they_come_back() -> None:
    waiting = WaitingQueue()
    late, early = sequence(arrived_at=2.0), sequence(arrived_at=1.0)
    early.admission = late.admission = 1
    waiting.add(late, 3.0)
    waiting.add(early, 4.0)
    assert order(waiting, 4.0) == [early, late]


def test_tokens_are_counted_as_they_were_at_entry() -> None:
    waiting = WaitingQueue()
    short, long = sequence(3), sequence(9)
    waiting.add(short, 0.0, num_blocks=2)
    waiting.add(long, 0.0, num_blocks=3)
    assert (len(waiting), waiting.num_tokens, waiting.num_blocks) == (2, 12, 5)
    long.output_token_ids.append(1)  # a late token of a preempted sequence
    waiting.remove(long)
    assert (len(waiting), waiting.num_tokens, waiting.num_blocks) == (1, 3, 2)
    assert long not in waiting


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().head(0.0) is None


def test_every_change_is_a_new_version() -> None:
    waiting = WaitingQueue()
    found = add(waiting)
    before = waiting.version
    waiting.take(found, 1.0)
    assert waiting.version > before


def test_tenants_are_served_in_turn_by_tokens_and_not_by_requests() -> None:
    waiting = queue()
    large = [add(waiting, tenant="a", size=30) for _ in range(3)]
    small = [add(waiting, tenant="b", size=10, at=1.0) for _ in range(5)]
    assert order(waiting) == [large[0], *small[:3], large[1], *small[3:], large[2]]


def test_a_tenant_that_was_served_less_comes_first_whenever_it_comes() -> None:
    waiting = queue()
    busy = add(waiting, tenant="a")
    waiting.policy.shares.enter("b")
    waiting.policy.shares.charge("a", 1000)
    late = add(waiting, tenant="b", at=60.0)
    assert order(waiting, 60.0) == [late, busy]


def test_without_fair_share_tenants_are_no_different() -> None:
    waiting = queue(enable_fair_share=False)
    first = add(waiting, tenant="a")
    waiting.policy.shares.charge("a", 1000)
    second = add(waiting, tenant="b", at=1.0)
    assert order(waiting, 1.0) == [first, second]


def test_a_smaller_priority_is_earlier_and_equals_come_in_turn() -> None:
    waiting = queue(policy="priority")
    ordinary = add(waiting)
    late, urgent = add(waiting, at=1.0, priority=5), add(waiting, at=2.0, priority=-3)
    other = add(waiting, at=3.0)
    assert order(waiting, 3.0) == [urgent, ordinary, other, late]


def test_priorities_do_not_count_first_come_first_served() -> None:
    waiting = queue()
    first, second = add(waiting, priority=9), add(waiting, at=1.0, priority=-9)
    assert order(waiting, 1.0) == [first, second]


def test_waiting_makes_up_for_priority_so_that_nobody_starves() -> None:
    waiting = queue(policy="priority", priority_ageing_s=10.0)
    patient = add(waiting, priority=3)
    assert waiting.head(29.0) is patient
    urgent = add(waiting, at=29.0, priority=0)
    assert order(waiting, 29.0) == [urgent, patient]
    waiting.remove(urgent)
    urgent = add(waiting, at=31.0, priority=0)
    assert order(waiting, 31.0) == [patient, urgent]


def test_a_tenant_of_low_priority_is_served_once_its_wait_makes_up_for_it() -> None:
    waiting = queue(policy="priority", priority_ageing_s=10.0)
    patient = add(waiting, tenant="a", priority=3)
    add(waiting, tenant="b")
    now = 0.0
    while patient in waiting:
        add(waiting, tenant="b", at=now)
        head = waiting.head(now)
        assert head is not None
        waiting.take(head, now)
        waiting.policy.shares.charge(head.tenant_id, head.num_tokens)
        now += 5.0
    assert now == 35.0, "its level was that of the others after three times the ageing"


def test_without_ageing_priorities_are_strict() -> None:
    waiting = queue(policy="priority", priority_ageing_s=0)
    patient = add(waiting, priority=3)
    urgent = add(waiting, at=1e6, priority=2)
    assert order(waiting, 1e6) == [urgent, patient]
    other = add(waiting, at=1e6, tenant="b", priority=1)
    assert waiting.head(1e6) is other


def test_a_long_backlog_of_a_tenant_is_no_claim_against_others() -> None:
    """Its turn comes all the time, so what stands behind it has not been passed over."""
    waiting = queue(policy="priority", priority_ageing_s=10.0)
    backlog = [add(waiting, tenant="a") for _ in range(3)]
    waiting.take(backlog[0], 500.0)
    light = add(waiting, tenant="b", at=505.0)
    waiting.policy.shares.charge("a", 5)
    assert waiting.head(505.0) is light


def test_tokens_before_a_newcomer_are_its_share_of_the_others() -> None:
    waiting = queue()
    for _ in range(10):
        add(waiting, tenant="a", size=100)
    add(waiting, tenant="b", size=20)
    assert waiting.tokens_before("c", 50) == 50 + 20
    assert waiting.tokens_before("a", 50) == 1000 + 20
    preempted = sequence(7)
    preempted.admission = 1
    waiting.add(preempted, 0.0)
    assert waiting.tokens_before("c", 50) == 50 + 20 + 7
