"""What is found is what was computed and confirmed, by the same model under the same salt."""

import pytest

from services.scheduler.cache_events import CacheChange
from services.scheduler.prefix_cache import NUM_AHEAD
from tests.services.scheduler.cache_room import SIZE, Room, make


def test_the_longest_known_start_is_found() -> None:
    room = Room()
    first = room.compute(list(range(12)))
    assert room.cache.find(make([*range(12), 99])) == first.blocks
    assert room.cache.find(make([*range(9), 99, 99, 99, 99])) == first.blocks[:2]
    assert room.cache.find(make([99, *range(12)])) == []


@pytest.mark.parametrize("length", [8, 9, 12, 13])
def test_the_last_token_is_always_left_to_compute(length: int) -> None:
    room = Room()
    room.compute(list(range(16)))
    assert len(room.cache.find(make(list(range(length))))) == (length - 1) // SIZE


def test_prompt_and_output_make_one_text() -> None:
    room = Room()
    done = make([0, 1, 2], output=(3, 4, 5, 6, 7))
    done.blocks = room.cache.pool.allocate(2)
    room.cache.publish(done, 7)
    assert room.cache.find(make(list(range(9)))) == done.blocks[:1]
    room.cache.publish(done, 8)
    assert room.cache.find(make(list(range(9)))) == done.blocks


def test_what_another_replica_held_is_not_taken_for_its_own() -> None:
    here, there = Room(), Room()
    first = here.compute(list(range(12)))
    second = there.compute(list(range(8)))
    waiting = make(list(range(13)))
    assert here.cache.find(waiting) == first.blocks
    assert there.cache.find(waiting) == second.blocks
    assert here.cache.find(waiting) == first.blocks


def test_salts_and_models_do_not_share() -> None:
    room = Room()
    room.compute(list(range(8)), salt="a")
    assert room.cache.find(make(list(range(9)))) == []
    assert room.cache.find(make(list(range(9)), salt="b")) == []
    assert len(room.cache.find(make(list(range(9)), salt="a"))) == 2
    one, other = Room(model_digest="x"), Room(model_digest="y")
    moved = make(list(range(9)))
    names = [list(place.cache.hashes_of(moved).root) for place in (one, other, one)]
    assert names[0] == names[2] != names[1]


def test_a_sequence_may_leave_the_cache_unread_and_still_names_its_blocks() -> None:
    room = Room()
    room.compute(list(range(8)))
    assert room.cache.find(make(list(range(9)), skip=True)) == []
    assert not room.cache.is_coming(make(list(range(9)), skip=True))
    room.compute(list(range(20, 28)), skip=True)
    assert len(room.cache.find(make([*range(20, 28), 9]))) == 2


def test_a_second_block_of_the_same_content_stays_without_a_name() -> None:
    room = Room()
    first = room.compute(list(range(8)))
    second = room.compute([*range(8), 8, 9, 10, 11])
    assert room.cache.find(make(list(range(13)))) == [*first.blocks, second.blocks[2]]
    assert room.cache.num_named == 3
    room.cache.check(0)


def test_a_block_that_is_handed_out_again_is_found_no_more() -> None:
    room = Room(num_blocks=5)
    first = room.compute(list(range(12)))
    waiting = make(list(range(13)))
    assert len(room.cache.find(waiting)) == 3
    room.cache.pool.release(first.blocks)
    room.cache.pool.allocate(2)  # the free one and the deepest of the table
    assert room.cache.find(waiting) == first.blocks[:2]
    assert room.changes().count(CacheChange.REMOVED) == 1
    room.cache.check(0)


def test_looking_up_again_hashes_and_probes_nothing() -> None:
    room = Room(num_blocks=1025)
    room.compute(list(range(4000)))
    waiting = make(list(range(4001)))
    found = room.cache.find(waiting)
    assert len(found) == 1000
    assert waiting.found is not None
    # Poison what a second walk would need: it must not walk.
    waiting.found.blocks.append(-1)
    assert room.cache.find(waiting) is found
    room.cache.pool.allocate(24)
    assert room.cache.find(waiting) is found, "blocks without a name were handed out"


def test_a_found_start_grows_with_what_is_named_meanwhile() -> None:
    room = Room()
    waiting = make(list(range(13)))
    first = room.compute(list(range(4)))
    assert room.cache.find(waiting) == first.blocks
    rest = room.compute(list(range(12)))
    assert room.cache.find(waiting) == [*first.blocks, *rest.blocks[1:]]


def test_more_losses_than_are_remembered_make_it_look_again() -> None:
    room = Room(num_blocks=5)
    waiting = make(list(range(5)))
    first = room.compute(list(range(4)))
    assert room.cache.find(waiting) == first.blocks
    room.cache.clear([])
    assert room.cache.find(waiting) == []


def test_a_block_of_a_plan_in_flight_is_coming_until_its_result() -> None:
    room = Room()
    first = room.compute(list(range(4)))
    leader = make(list(range(12)))
    leader.num_named_blocks = 1
    names = room.cache.announce(leader, 11)
    assert len(names) == 1
    follower, other = make(list(range(10))), make([7, 7, 7, 7, 7])
    short = make(list(range(8)))
    for sequence in (follower, other, short):
        room.cache.find(sequence)
    assert room.cache.is_coming(follower)
    assert not room.cache.is_coming(other)
    # It computes its last token itself, so the second block is of no use to it.
    assert not room.cache.is_coming(short)
    room.cache.settle(names)
    assert not room.cache.is_coming(follower)
    assert room.cache.find(follower) == first.blocks
    room.cache.check(0)


def test_after_a_reset_nothing_from_before_is_found_or_named() -> None:
    room = Room()
    idle, running = room.compute(list(range(8))), room.compute(list(range(20, 28)))
    room.cache.pool.release(idle.blocks)
    assert room.cache.clear([running]) == 4
    assert room.cache.find(make(list(range(9)))) == []
    running.output_token_ids.extend(range(8))
    running.blocks += room.cache.pool.allocate(2)
    room.cache.publish(running, 15)
    assert room.cache.announce(running, 15) == []
    assert room.cache.num_named == 0
    assert room.cache.pool.num_idle == 0
    assert room.changes()[-1] is CacheChange.CLEARED
    room.cache.check(0)


def test_what_a_broken_sequence_computed_is_forgotten() -> None:
    room = Room()
    broken = make(list(range(12)))
    broken.blocks = room.cache.pool.allocate(3)
    room.cache.publish(broken, 8)
    assert room.cache.num_named == 2
    room.cache.distrust(broken)
    assert room.cache.find(make(list(range(9)))) == []
    room.cache.publish(broken, 12)
    assert room.cache.num_named == 0
    room.cache.check(0)


def test_a_lost_epoch_clears_the_picture_of_readers() -> None:
    room = Room()
    room.cache.close()
    assert room.changes() == []
    room.compute(list(range(4)))
    room.cache.close()
    assert room.changes() == [CacheChange.STORED, CacheChange.CLEARED]


def test_stored_blocks_name_their_parents() -> None:
    room = Room()
    done = room.compute(list(range(8)))
    assert done.hashes is not None
    first, second = room.log.read(0).events
    assert first.parent_hash == done.hashes.root
    assert second.parent_hash == first.block_hash == done.hashes.known[0]
    assert second.block_hash == done.hashes.known[1]


def test_without_caching_nothing_is_named_found_or_counted() -> None:
    room = Room(enabled=False)
    done = room.compute(list(range(8)))
    room.cache.count(done, 0)
    assert room.cache.announce(done, 8) == []
    assert room.cache.find(make(list(range(9)))) == []
    assert (room.cache.num_named, room.cache.counts.num_queries, room.log.number) == (0, 0, 0)
    assert done.hashes is None


def test_a_long_start_is_looked_up_ahead_in_pieces() -> None:
    room = Room(num_blocks=2 * NUM_AHEAD + 10)
    room.compute(list(range(SIZE * 2 * NUM_AHEAD + 8)))
    waiting = make(list(range(SIZE * 2 * NUM_AHEAD + 5)))
    assert room.cache.look_ahead(waiting)
    assert waiting.hashes is not None
    assert len(waiting.hashes.known) == NUM_AHEAD
    assert room.cache.look_ahead(waiting)
    assert not room.cache.look_ahead(waiting)
    assert len(room.cache.find(waiting)) == 2 * NUM_AHEAD + 1
    assert not room.cache.look_ahead(make([1, 2, 3, 4, 5], skip=True))


def test_tokens_are_counted_once_for_each_sequence() -> None:
    room = Room()
    room.cache.count(make(list(range(9))), 8)
    assert (room.cache.counts.num_queries, room.cache.counts.num_hits) == (9, 8)


def test_a_sequence_whose_prompt_is_measured_computes_all_of_it() -> None:
    room = Room()
    room.compute(list(range(12)))
    assert room.cache.find(make([*range(12), 99], num_prompt_logprobs=0)) == []
