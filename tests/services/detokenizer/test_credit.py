from services.detokenizer.credit import Credit
from services.detokenizer.placement import Newcomer


def counts(credit: Credit) -> tuple[int, int]:
    return credit.num_sequences, credit.num_tokens


def test_what_was_answered_is_in_the_next_snapshot_and_the_rest_is_not() -> None:
    credit, first, second = Credit(), object(), object()
    credit.add(first, Newcomer(num_sequences=2, num_tokens=30))
    credit.add(second, Newcomer(num_sequences=1, num_tokens=5))
    credit.look()
    assert counts(credit) == (3, 35), "a snapshot from before the answers"
    credit.answer(first)
    assert counts(credit) == (3, 35)
    credit.look()
    assert counts(credit) == (1, 5)
    credit.answer(second)
    credit.look()
    assert counts(credit) == (0, 0)


def test_what_is_refused_or_over_is_gone_at_once_and_once() -> None:
    credit, owner = Credit(), object()
    credit.add(owner, Newcomer(num_sequences=2, num_tokens=30))
    credit.answer(owner)
    credit.remove(owner)
    credit.remove(owner)
    credit.look()
    credit.answer(owner)
    credit.look()
    assert counts(credit) == (0, 0)


def test_a_lost_scheduler_owes_nothing() -> None:
    credit, owner = Credit(), object()
    credit.add(owner, Newcomer(num_sequences=2, num_tokens=30))
    credit.clear()
    credit.remove(owner)
    assert counts(credit) == (0, 0)
