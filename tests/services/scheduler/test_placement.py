import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.placement import ReplicaWork, choose_replica


def work(**changes: int) -> ReplicaWork:
    values = {
        "num_sequences": 0,
        "num_tokens": 0,
        "num_free_blocks": 100,
        "num_total_blocks": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 50,
        "max_sequence_len": 1000,
    }
    return ReplicaWork(**(values | changes))


@pytest.mark.parametrize(
    ("replicas", "chosen"),
    [
        ([work(), work()], 0),
        ([work(num_tokens=1), work()], 1),
        ([work(num_free_blocks=99), work()], 1),
        # Half a step of tokens weighs more than a tenth of the cache.
        ([work(num_tokens=25), work(num_free_blocks=90)], 1),
        ([work(num_sequences=4), work(num_tokens=1000)], 1),
        ([work(num_free_blocks=1), work(num_tokens=1000)], 1),
        ([None, work(num_tokens=1000)], 1),
        ([None, work(num_sequences=4)], None),
        ([None, None], None),
        ([work(num_free_blocks=-3)], None),
    ],
)
def test_a_sequence_goes_where_least_is_to_do_and_room_is(
    replicas: list[ReplicaWork | None], chosen: int | None
) -> None:
    assert choose_replica(replicas, 2) == chosen


@given(
    free=st.lists(st.integers(-5, 100), min_size=1, max_size=6),
    tokens=st.lists(st.integers(0, 500), min_size=6, max_size=6),
    num_blocks=st.integers(1, 100),
)
def test_the_choice_always_has_room_and_no_other_with_room_costs_less(
    free: list[int], tokens: list[int], num_blocks: int
) -> None:
    replicas = [
        work(num_free_blocks=blocks, num_tokens=count)
        for blocks, count in zip(free, tokens, strict=False)
    ]
    chosen = choose_replica(replicas, num_blocks)
    fitting = [one for one in replicas if one.has_room(num_blocks)]
    if chosen is None:
        assert not fitting
    else:
        assert replicas[chosen].has_room(num_blocks)
        assert replicas[chosen].cost() == min(one.cost() for one in fitting)


@pytest.mark.parametrize(
    ("replicas", "hits", "chosen"),
    [
        ([work(), work()], [0, 40], 1),
        # Tokens that the hit saves weigh as much as two that wait there, and no more.
        ([work(), work(num_tokens=79)], [0, 40], 1),
        ([work(), work(num_tokens=81)], [0, 40], 0),
        ([work(), work(num_free_blocks=10)], [0, 20], 0),
        ([work(), None], [0, 40], 0),
        ([work(), work(num_sequences=4)], [0, 40], 0),
        # Those that cost the same: where least is cached.
        ([work(num_named_blocks=5), work(num_named_blocks=4)], [0, 0], 1),
    ],
)
def test_tokens_that_a_replica_holds_are_no_work_there(
    replicas: list[ReplicaWork | None], hits: list[int], chosen: int
) -> None:
    assert choose_replica(replicas, 2, 48, hits) == chosen


@given(
    num_replicas=st.integers(1, 8),
    num_arrivals=st.integers(1, 200),
    max_num_seqs=st.sampled_from([4, 16, 64]),
)
def test_a_start_that_everybody_has_piles_up_nowhere(
    num_replicas: int, num_arrivals: int, max_num_seqs: int
) -> None:
    """One replica holds all of it, so the hit outweighs whatever else there is to do."""
    counts = [0] * num_replicas
    for _ in range(min(num_arrivals, num_replicas * max_num_seqs)):
        replicas: list[ReplicaWork | None] = [
            work(num_sequences=count, num_tokens=count, max_num_seqs=max_num_seqs)
            for count in counts
        ]
        chosen = choose_replica(replicas, 1, 10_000, [10_000] + [0] * (num_replicas - 1))
        assert chosen is not None
        counts[chosen] += 1
        mean = sum(counts) / num_replicas
        assert max(counts) <= 1.25 * mean + max_num_seqs / 16 + 1
