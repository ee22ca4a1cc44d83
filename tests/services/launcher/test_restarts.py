from services.launcher.restarts import MAX_RESTARTS, WINDOW_S, RestartPolicy


def test_the_pause_doubles_and_the_fourth_death_in_a_minute_is_the_last() -> None:
    policy = RestartPolicy()
    pauses = [policy.next_pause(float(moment)) for moment in range(MAX_RESTARTS + 1)]
    assert pauses == [0.1, 0.2, 0.4, None]


def test_a_quiet_minute_forgives() -> None:
    policy = RestartPolicy()
    for moment in range(MAX_RESTARTS):
        policy.next_pause(float(moment))
    assert policy.next_pause(WINDOW_S + 10) == 0.1
