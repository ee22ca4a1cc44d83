"""Counters of tenants: no credit for absence, no debt forgotten, bounded state."""

from shared.shares import Shares


def test_a_newcomer_starts_where_the_least_served_is() -> None:
    shares = Shares()
    shares.enter("a")
    shares.enter("b")
    shares.charge("a", 1000)
    shares.charge("b", 400)
    shares.enter("c")
    assert shares.served("c") == shares.served("b") == 400


def test_time_without_requests_earns_no_credit() -> None:
    shares = Shares()
    shares.enter("idle")
    shares.leave("idle")
    shares.enter("busy")
    shares.charge("busy", 5000)
    shares.enter("idle")
    assert shares.served("idle") == 5000


def test_a_short_pause_does_not_clear_a_debt() -> None:
    shares = Shares()
    shares.enter("light")
    shares.enter("heavy")
    shares.charge("heavy", 5000)
    shares.leave("heavy")
    shares.enter("heavy")
    assert shares.served("heavy") - shares.served("light") == 5000


def test_a_tenant_with_several_requests_leaves_with_its_last() -> None:
    shares = Shares()
    shares.enter("a")
    shares.enter("a")
    shares.leave("a")
    shares.charge("a", 7)
    shares.leave("a")
    assert shares.served("a") == 7


def test_state_is_bounded_and_keeps_the_largest_debts() -> None:
    shares = Shares(max_idle=10)
    shares.enter("there")
    for number in range(1000):
        shares.enter(str(number))
        shares.charge(str(number), number)
        shares.leave(str(number))
        assert len(shares) <= 12
    assert shares.served("999") == 999
    assert shares.served("there") == 0
    assert shares.served("5") == 0, "forgotten"
