from services.launcher.restarts import MAX_PAUSE_S, MAX_RESTARTS, WINDOW_S, RestartPolicy


def test_the_pause_doubles_and_the_fourth_death_in_a_minute_is_the_last() -> None:
    policy = RestartPolicy()
    pauses = [policy.next_pause(float(moment)) for moment in range(MAX_RESTARTS + 1)]
    assert pauses == [0.1, 0.2, 0.4, None]
    assert policy.num_failures == 0


def test_a_quiet_minute_forgives() -> None:
    policy = RestartPolicy()
    for moment in range(MAX_RESTARTS):
        policy.next_pause(float(moment))
    assert policy.next_pause(WINDOW_S + 10) == 0.1


def fail_beside_a_sibling(
    policy: RestartPolicy, now: float, times: int
) -> tuple[float, list[float]]:
    """Die one second after each start; the time of the last start, and the pauses."""
    pauses: list[float] = []
    for _ in range(times):
        pause = policy.next_pause(now, has_sibling=True)
        assert pause is not None
        pauses.append(pause)
        now += pause + 1
    return now - 1, pauses


def test_beside_a_sibling_it_is_tried_on_after_longer_pauses_up_to_the_limit() -> None:
    policy = RestartPolicy()
    _, pauses = fail_beside_a_sibling(policy, 0.0, 12)
    assert pauses == [0.1, 0.2, 0.4, 1.0, 2.0, 4.0, 8.0, 16.0, *[MAX_PAUSE_S] * 4]
    assert policy.num_failures == 12


def test_beside_a_sibling_too_a_quiet_minute_forgives() -> None:
    policy = RestartPolicy()
    started, _ = fail_beside_a_sibling(policy, 0.0, 9)
    assert policy.next_pause(started + WINDOW_S - 1, has_sibling=True) == MAX_PAUSE_S
    started += WINDOW_S - 1 + MAX_PAUSE_S
    assert policy.next_pause(started + WINDOW_S, has_sibling=True) == 0.1
    assert policy.num_failures == 0


def test_once_the_sibling_is_gone_the_fourth_death_in_a_minute_is_the_last_again() -> None:
    policy = RestartPolicy()
    started, _ = fail_beside_a_sibling(policy, 0.0, 10)
    pauses = [policy.next_pause(started + moment) for moment in range(1, 5)]
    assert pauses[-1] is None
    assert None not in pauses[:2]
