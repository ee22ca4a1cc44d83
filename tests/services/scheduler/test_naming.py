"""Blocks get names after the result that fills them, and never those of a sequence that left."""

from services.scheduler.naming import MAX_DUE, Naming
from services.scheduler.results import PlanRecord
from services.scheduler.sequence import Sequence, SequenceState
from tests.services.scheduler.cache_room import SIZE, Room, make


def running(room: Room, num_tokens: int) -> Sequence:
    sequence = make(list(range(num_tokens)))
    sequence.blocks = room.cache.pool.allocate(-(-num_tokens // SIZE))
    sequence.state, sequence.admission = SequenceState.RUNNING, 1
    return sequence


def record(naming: Naming) -> PlanRecord:
    made = PlanRecord(None, [])  # type: ignore[arg-type]  # the plan does not matter here
    made.filled, made.names = naming.take()
    return made


def test_a_chunk_is_coming_with_its_plan_and_named_after_its_result() -> None:
    room = Room()
    naming, sequence = Naming(room.cache, SIZE), running(room, 10)
    sequence.num_planned_tokens = 9
    naming.note_chunk(sequence)
    follower = make(list(range(9)))
    assert room.cache.find(follower) == []
    assert room.cache.is_coming(follower)
    naming.settle(record(naming))
    assert room.cache.num_named == 0, "a step does not wait for names"
    naming.catch_up()
    assert room.cache.find(follower) == sequence.blocks[:2]
    assert not room.cache.is_coming(follower)


def test_a_chunk_that_fills_no_block_is_not_noted() -> None:
    room = Room()
    naming, sequence = Naming(room.cache, SIZE), running(room, 10)
    sequence.num_planned_tokens = 3
    naming.note_chunk(sequence)
    assert naming.take() == ([], [])


def test_a_sequence_that_left_names_nothing_even_if_it_runs_again() -> None:
    room = Room()
    naming, sequence = Naming(room.cache, SIZE), running(room, 10)
    sequence.num_planned_tokens = 9
    naming.note_growth(sequence)
    filled = record(naming)
    naming.settle(filled)
    sequence.state = SequenceState.WAITING
    naming.catch_up()
    assert room.cache.num_named == 0
    naming.settle(filled)
    sequence.state, sequence.admission = SequenceState.RUNNING, 2
    naming.catch_up()
    assert room.cache.num_named == 0


def test_what_is_due_does_not_gather_without_end() -> None:
    room = Room()
    naming, sequence = Naming(room.cache, SIZE), running(room, 10)
    many = record(naming)
    many.filled = [(sequence, 1, 8)] * MAX_DUE
    naming.settle(many)
    assert room.cache.num_named == 0
    sequence.num_planned_tokens = 9
    naming.note_growth(sequence)
    naming.settle(record(naming))
    assert room.cache.num_named == 2


def test_tidying_up_names_hashes_and_looks_up_what_the_next_plan_needs() -> None:
    room = Room()
    naming, sequence = Naming(room.cache, SIZE), running(room, 12)
    known = room.compute([5] * 8)
    waiting = make([5] * 9)
    naming.note_growth(sequence)
    naming.settle(record(naming))
    assert not naming.tidy([waiting], [sequence], 8)
    assert sequence.hashes is not None
    assert len(sequence.hashes.known) == 2
    assert waiting.found is not None
    assert waiting.found.blocks == known.blocks
