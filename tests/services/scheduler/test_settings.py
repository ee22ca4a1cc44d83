"""Flags of a scheduler process."""

import pytest

from services.scheduler.settings import SchedulerSettings
from shared.config import parse
from shared.errors import ConfigError

NEEDED = ["--address", "unix:/run/s", "--worker-address", "unix:/run/w"]


def test_the_launchers_flags_are_understood() -> None:
    settings = parse(
        SchedulerSettings,
        [
            *NEEDED,
            *[
                "--health-address",
                "unix:/run/h",
                "--admin-address",
                "unix:/run/a",
                "--log-level",
                "debug",
            ],
            *["--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--max-model-len", "4096"],
            *["--max-queued-requests", "10", "--max-queued-tokens", "1000"],
            *["--max-plans-in-flight", "2", "--step-timeout-s", "7"],
        ],
    )
    core, engine = settings.core_config, settings.engine_config
    assert (core.max_num_seqs, core.max_num_batched_tokens, core.max_model_len) == (8, 512, 4096)
    assert (core.max_queued_requests, core.max_queued_tokens) == (10, 1000)
    assert core.max_plans_in_flight == engine.max_plans_in_flight == 2
    assert engine.step_timeout_s == 7


def test_limits_that_are_not_given_are_left_to_the_worker() -> None:
    core = parse(SchedulerSettings, NEEDED).core_config
    assert (core.max_num_seqs, core.max_num_batched_tokens, core.max_model_len) == (0, 0, 0)


def test_every_default_is_accepted_by_the_parts() -> None:
    settings = parse(SchedulerSettings, NEEDED)
    assert settings.outbox_limits.stall_s == 2.0
    assert settings.engine_config.worker_grace_s < 2.0, "clients hear of a lost worker within 2 s"


def test_a_group_of_ranks_gets_the_time_to_start_again_unless_another_is_given() -> None:
    group = parse(SchedulerSettings, [*NEEDED, "--num-ranks", "2"])
    assert group.engine_config.worker_grace_s >= 60, "to read the weights anew"
    for ranks in ("1", "2"):
        flags = ["--num-ranks", ranks, "--worker-grace-s", "0.5"]
        assert parse(SchedulerSettings, [*NEEDED, *flags]).engine_config.worker_grace_s == 0.5


@pytest.mark.parametrize(
    "flags",
    [
        "--max-plans-in-flight 3",
        "--max-num-seqs 0",
        "--scheduling-policy lifo",
        "--watermark 1",
        "--priority-ageing-s -1",
        "--long-prefill-token-threshold -1",
        "--max-num-partial-prefills 0",
        "--max-long-partial-prefills 5",
        "--max-plans-in-flight 1 --async-scheduling",
        "--step-timeout-s 0",
        "--num-ranks 0",
        "--worker-grace-s -1",
        "--max-model-len 1",
    ],
)
def test_a_wrong_value_is_named(flags: str) -> None:
    with pytest.raises(ConfigError, match=flags.split(maxsplit=1)[0]):
        parse(SchedulerSettings, [*NEEDED, *flags.split()])


def test_prefixes_are_shared_unless_that_is_switched_off() -> None:
    assert parse(SchedulerSettings, NEEDED).core_config.enable_prefix_caching
    off = parse(SchedulerSettings, [*NEEDED, "--no-enable-prefix-caching"])
    assert not off.core_config.enable_prefix_caching


def test_policies_reach_the_core() -> None:
    flags = "--scheduling-policy priority --priority-ageing-s 5 --no-enable-fair-share"
    flags += " --watermark 0.1 --long-prefill-token-threshold 99 --max-num-partial-prefills 7"
    flags += " --max-long-partial-prefills 3"
    config = parse(SchedulerSettings, [*NEEDED, *flags.split()]).core_config
    assert (config.policy, config.priority_ageing_s) == ("priority", 5.0)
    assert (config.enable_fair_share, config.watermark) == (False, 0.1)
    assert config.long_prefill_token_threshold == 99
    assert (config.max_num_partial_prefills, config.max_long_partial_prefills) == (7, 3)


@pytest.mark.parametrize(
    ("flags", "num_plans"),
    [
        ("", 1),
        ("--async-scheduling", 2),
        ("--max-plans-in-flight 2", 2),
        ("--no-async-scheduling --max-plans-in-flight 1", 1),
    ],
)
def test_planning_ahead_means_two_plans_in_flight(flags: str, num_plans: int) -> None:
    settings = parse(SchedulerSettings, [*NEEDED, *flags.split()])
    assert settings.core_config.max_plans_in_flight == num_plans
    assert settings.engine_config.max_plans_in_flight == num_plans


def test_the_worker_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--worker-address is required"):
        parse(SchedulerSettings, NEEDED[:2])


def test_each_replica_has_a_worker_of_its_own() -> None:
    second = ["--worker-address", "unix:/run/w2"]
    assert parse(SchedulerSettings, NEEDED).worker_address == ["unix:/run/w"]
    found = parse(SchedulerSettings, [*NEEDED, *second])
    assert found.worker_address == ["unix:/run/w", "unix:/run/w2"]
    with pytest.raises(ConfigError, match="unix:/run/w2 is there twice"):
        parse(SchedulerSettings, [*NEEDED, *second, *second])
