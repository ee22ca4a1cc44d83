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
        assert replicas[chosen].cost == min(one.cost for one in fitting)
