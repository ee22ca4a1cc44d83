"""The bounds of an epoch are the minimum of both sides."""

import pytest

from services.scheduler.limits import CoreConfig, Limits
from shared.errors import ConfigError
from tests.services.scheduler.builders import capacity


def test_without_own_settings_the_worker_decides() -> None:
    limits = Limits.of(CoreConfig(), capacity())
    assert limits.max_num_seqs == 4
    assert limits.max_num_batched_tokens == 32
    assert limits.max_model_len == limits.max_sequence_len == 64


def test_own_settings_only_make_bounds_tighter() -> None:
    config = CoreConfig(max_num_seqs=2, max_num_batched_tokens=1000, max_model_len=48)
    limits = Limits.of(config, capacity())
    assert limits.max_num_seqs == 2
    assert limits.max_num_batched_tokens == 32
    assert limits.max_model_len == 48


def test_half_of_the_rows_can_be_in_use() -> None:
    assert Limits.of(CoreConfig(), capacity(num_rows=6)).max_num_seqs == 3


def test_every_running_sequence_fits_into_one_step() -> None:
    assert Limits.of(CoreConfig(), capacity(max_num_batched_tokens=3)).max_num_seqs == 3


def test_a_sequence_alone_fits_the_pool() -> None:
    limits = Limits.of(CoreConfig(), capacity(num_blocks=6))
    assert limits.max_model_len == 64
    assert limits.max_sequence_len == 20


def test_blocks_are_rounded_up() -> None:
    limits = Limits.of(CoreConfig(), capacity())
    assert [limits.blocks_for(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", -1),
        ("max_model_len", -1),
        ("max_queued_requests", 0),
        ("max_queued_tokens", 0),
        ("max_plans_in_flight", 3),
        ("max_timeout_s", 0.0),
        ("policy", "lifo"),
        ("watermark", 1.0),
        ("priority_ageing_s", -1.0),
        ("long_prefill_token_threshold", -1),
        ("max_num_partial_prefills", 0),
        ("max_long_partial_prefills", 5),
    ],
)
def test_a_setting_outside_its_bounds_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        CoreConfig(**{name: value})


def test_a_step_holds_all_drafts_of_every_running_sequence() -> None:
    limits = Limits.of(CoreConfig(), capacity(num_speculative_tokens=3, max_num_batched_tokens=11))
    assert limits.num_decode_tokens == 4
    assert limits.max_num_seqs == 2


def test_a_step_too_small_for_the_drafts_of_one_sequence_takes_fewer() -> None:
    config = CoreConfig(max_num_batched_tokens=3)
    limits = Limits.of(config, capacity(num_speculative_tokens=5))
    assert (limits.num_speculative_tokens, limits.max_num_seqs) == (2, 1)


@pytest.mark.parametrize(
    ("window", "num_drafts", "lookahead"),
    [(1, 0, 0), (2, 0, 0), (1, 1, 1), (2, 1, 2), (1, 3, 5), (2, 3, 8), (2, 5, 14)],
)
def test_what_plans_in_flight_may_keep_and_propose_is_looked_ahead(
    window: int, num_drafts: int, lookahead: int
) -> None:
    config = CoreConfig(max_plans_in_flight=window)
    limits = Limits.of(config, capacity(num_speculative_tokens=num_drafts))
    assert limits.num_lookahead_tokens == lookahead


def test_a_step_without_room_for_drafts_still_hears_of_them() -> None:
    limits = Limits.of(CoreConfig(max_num_batched_tokens=1), capacity(num_speculative_tokens=5))
    assert (limits.num_speculative_tokens, limits.is_drafting) == (0, True)
    assert not Limits.of(CoreConfig(), capacity()).is_drafting
