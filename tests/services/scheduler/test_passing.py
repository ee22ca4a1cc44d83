"""Small sequences pass a large one, up to what it needs itself."""

from services.scheduler.outlet import Outlet
from services.scheduler.passing import Passing
from tests.services.scheduler.builders import capacity, sequence
from tests.services.scheduler.harness import Harness


def test_those_that_pass_take_as_many_blocks_as_the_one_passed_needs() -> None:
    large = sequence()
    passing = Passing()
    assert passing.allows(99)
    passing.stop(large, 10)
    for _ in range(5):
        assert passing.allows(2)
        passing.note(2)
    assert not passing.allows(1)
    later = Passing()
    later.stop(large, 10)
    assert not later.allows(1), "what passed before counts"


def test_all_that_are_passed_have_a_say() -> None:
    passing = Passing()
    passing.stop(sequence(), 10)
    passing.stop(sequence(), 3)
    assert passing.allows(3)
    assert not passing.allows(4)


def pool_with_a_long_runner() -> tuple[Harness, Outlet]:
    """12 of 16 blocks are taken by one that runs long."""
    harness, outlet = Harness(capacity(num_blocks=17, max_num_seqs=8, num_rows=16)), Outlet()
    harness.submit(outlet, [40], max_tokens=23)
    harness.step()
    harness.step()
    return harness, outlet


def test_a_head_that_does_not_fit_does_not_stop_those_that_do() -> None:
    harness, outlet = pool_with_a_long_runner()
    harness.submit(outlet, [32], max_tokens=4)
    harness.submit(outlet, [4], max_tokens=1)
    harness.step()
    assert harness.streams[2].end is not None
    assert harness.streams[1].tokens == []


def test_those_that_pass_do_not_starve_the_head() -> None:
    """A stream of small ones that would take every block as it comes back."""
    harness, outlet = pool_with_a_long_runner()
    harness.submit(outlet, [48], max_tokens=4)
    large = harness.streams[1]
    num_small = 0
    while large.end is None:
        while harness.core.load().num_waiting < 6:
            harness.submit(outlet, [7], max_tokens=30)
            num_small += 1
        harness.step()
        assert len(harness.plans) < 200
    done = [s for s in harness.streams.values() if s.num_prompt == 7 and s.tokens]
    assert len(done) >= 1
    assert 2 * len([s for s in done if s.end]) <= 12 + 2 * 8


def test_replicas_are_given_small_ones_while_the_head_finds_no_room() -> None:
    harness = Harness(capacity(num_blocks=17), num_replicas=2)
    outlet = Outlet()
    harness.submit(outlet, [40, 40], max_tokens=20)
    harness.plan(0)
    harness.plan(1)
    harness.submit(outlet, [40], max_tokens=4)
    harness.submit(outlet, [4], max_tokens=1)
    harness.step()
    harness.step()
    assert harness.streams[3].end is not None
    assert not harness.streams[2].tokens
    harness.run_to_end()
