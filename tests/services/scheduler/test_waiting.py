"""First come, first served; the preempted come first."""

from services.scheduler.waiting import WaitingQueue
from tests.services.scheduler.builders import sequence


def test_order_is_that_of_arrival_and_the_preempted_come_first() -> None:
    queue = WaitingQueue()
    first, second, preempted = sequence(), sequence(), sequence()
    queue.append(first)
    queue.append(second)
    queue.push_front(preempted)
    assert list(queue) == [preempted, first, second]
    assert queue.head is preempted


def test_tokens_are_counted_as_they_were_at_entry() -> None:
    queue = WaitingQueue()
    short, long = sequence(3), sequence(9)
    queue.append(short)
    queue.push_front(long)
    assert (len(queue), queue.num_tokens) == (2, 12)
    long.output_token_ids.append(1)  # a late token of a preempted sequence
    queue.remove(long)
    assert (len(queue), queue.num_tokens) == (1, 3)
    assert long not in queue


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().head is None
