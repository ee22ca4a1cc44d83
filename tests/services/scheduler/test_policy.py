"""Who gives way, and who may be pushed out."""

from services.scheduler.limits import CoreConfig
from services.scheduler.outlet import Outlet
from services.scheduler.policy import MAX_DISPLACEMENTS, RESUMED, Policy
from services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import capacity, sequence
from tests.services.scheduler.harness import Harness


def running(admission: int, computed: int, priority: int = 0) -> Sequence:
    found = sequence(stream_id=admission)
    found.admission, found.num_planned_tokens = admission, computed
    found.request.priority = priority
    return found


FCFS, PRIORITY = Policy(CoreConfig()), Policy(CoreConfig(policy="priority"))


def test_the_cheapest_to_compute_again_gives_way() -> None:
    """The latest admitted holds a long prompt: pushing it out would cost most."""
    first, cheap, dear = running(1, 10), running(2, 20), running(3, 9000)
    assert FCFS.victim([first, cheap, dear]) is cheap


def test_of_equals_the_latest_admitted_gives_way() -> None:
    first, second, third = running(1, 50), running(2, 50), running(3, 50)
    assert FCFS.victim([third, first, second]) is third


def test_the_first_admitted_is_spared_so_that_somebody_gets_to_an_end() -> None:
    first, dear = running(1, 10), running(2, 9000)
    assert FCFS.victim([first, dear]) is dear
    assert FCFS.victim([first]) is first


def test_the_least_urgent_gives_way_whatever_it_costs() -> None:
    urgent, ordinary, late = running(3, 10, -1), running(2, 20), running(1, 9000, 4)
    assert PRIORITY.victim([urgent, ordinary, late]) is late
    assert PRIORITY.victim([urgent, ordinary]) is ordinary


def test_the_most_urgent_is_spared_though_it_came_last() -> None:
    urgent, other = running(9, 1, -1), running(1, 500, -1)
    late = running(2, 900)
    assert PRIORITY.victim([urgent, late]) is late
    assert PRIORITY.victim([urgent, other]) is urgent, "among equals the first is spared"


def test_only_strictly_less_urgent_ones_can_be_pushed_out_and_the_cheapest_first() -> None:
    waiting = running(0, 0, 1)
    equal, dear, cheap = running(1, 5, 1), running(2, 90, 2), running(3, 10, 2)
    last = running(4, 500, 3)
    assert PRIORITY.displaceable([equal, dear, cheap, last], waiting) == [last, cheap, dear]
    assert FCFS.displaceable([equal, dear, cheap, last], waiting) == []


def test_nobody_is_pushed_out_by_more_urgent_ones_for_ever() -> None:
    late = running(1, 5, 2)
    late.num_displacements = MAX_DISPLACEMENTS
    assert PRIORITY.displaceable([late], running(0, 0)) == []


def test_output_is_charged_once() -> None:
    policy = Policy(CoreConfig())
    found = sequence()
    policy.shares.enter("")
    found.output_token_ids.extend([1, 2, 3])
    policy.charge_output(found)
    policy.charge_output(found)
    found.output_token_ids.append(4)
    policy.charge_output(found)
    policy.charge_prompt(found, 5)
    assert policy.served("") == 4 * 2 + 5
    assert policy.served(RESUMED) < 0


def test_a_sequence_keeps_its_number() -> None:
    policy = Policy(CoreConfig())
    first, second = sequence(), sequence()
    for found in (first, second, first):
        policy.number(found)
    assert (first.number, second.number) == (0, 1)


def test_a_tenant_is_charged_while_its_sequence_runs_and_not_only_at_its_end() -> None:
    harness = Harness(capacity(num_blocks=64, max_model_len=200))
    harness.submit(Outlet(), [5], max_tokens=150, tenant_id="a")
    for _ in range(100):
        harness.step()
    served = harness.core._policy.shares.served("a")  # nothing tells it outside yet
    assert 5 + 2 * 64 <= served < 5 + 2 * 150
    harness.run_to_end()
    assert harness.core._policy.shares.served("a") == 5 + 2 * 150
