"""A long prompt leaves room in a step, and gets to its end all the same."""

from services.scheduler.limits import CoreConfig, Limits
from services.scheduler.outlet import Outlet
from services.scheduler.throttle import PromptThrottle
from tests.services.scheduler.builders import capacity, limits
from tests.services.scheduler.harness import Harness


def throttle(*, has_others: bool = True, **config: int) -> PromptThrottle:
    found = PromptThrottle(
        Limits.of(CoreConfig(**config), capacity(max_num_batched_tokens=8192, max_model_len=10**6))
    )
    found.begin(has_others=has_others)
    return found


def test_a_long_prompt_gets_an_eighth_of_a_step_that_others_need() -> None:
    assert throttle().count_for(100_000, 8192) == 1024
    assert throttle().count_for(1024, 8192) == 1024
    assert throttle().count_for(1025, 1000) == 1000
    assert throttle(long_prefill_token_threshold=100).count_for(101, 8192) == 100


def test_a_prompt_alone_gets_the_whole_step() -> None:
    assert throttle(has_others=False).count_for(100_000, 8192) == 8192


def test_without_a_threshold_no_prompt_is_long() -> None:
    assert throttle(long_prefill_token_threshold=0).count_for(100_000, 8192) == 8192


def test_a_small_step_is_not_cut_any_further() -> None:
    assert limits(max_num_batched_tokens=64).num_long_tokens == 256


def test_a_further_long_prompt_waits_for_those_before_it_and_short_ones_do_not() -> None:
    found = throttle(max_long_partial_prefills=1)
    found.note(100_000, 1024)
    assert not found.may_start(50_000, 6000)
    assert found.may_start(1000, 6000)
    assert throttle(max_long_partial_prefills=2).may_start(50_000, 6000)


def test_prompts_under_way_are_bounded() -> None:
    found = throttle(max_num_partial_prefills=2, max_long_partial_prefills=2)
    found.note(1000, 500)
    assert found.may_start(1000, 500)
    found.note(1000, 500)
    assert not found.may_start(1000, 500)
    assert found.may_start(500, 500), "done in one step, it is not under way"


def test_decoding_rows_and_short_prompts_move_while_a_long_prompt_runs() -> None:
    harness = Harness(
        capacity(num_blocks=400, max_num_batched_tokens=32, max_model_len=1200),
        long_prefill_token_threshold=12,
    )
    outlet = Outlet()
    harness.submit(outlet, [4], max_tokens=60)
    harness.step()
    harness.submit(outlet, [400], max_tokens=1)
    for _ in range(3):
        harness.step()
    harness.submit(outlet, [10], max_tokens=1)
    harness.step()
    assert len(harness.streams[0].tokens) == 5, "a token in each step"
    assert harness.streams[2].end is not None, "a short prompt is done in the step it comes"
    assert max(sum(plan.num_scheduled_tokens) for plan in harness.plans[1:4]) == 13
    harness.run_to_end()


def test_short_prompts_without_end_do_not_keep_a_long_one_from_its_own() -> None:
    harness = Harness(
        capacity(num_blocks=400, max_num_batched_tokens=32, max_model_len=1200),
        long_prefill_token_threshold=12,
    )
    outlet = Outlet()
    harness.submit(outlet, [400], max_tokens=1)
    for _ in range(400 // 12 + 1):
        while harness.core.load().num_waiting < 4:
            harness.submit(outlet, [10], max_tokens=1)
        harness.step()
    assert harness.streams[0].end is not None
