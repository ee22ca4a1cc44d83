import pytest

from services.worker.plan import FinishCode
from services.worker.replay import ReplayExecutor
from shared.errors import FailureReason
from shared.sampling import ReplayScript
from tests.services.worker.plans import (
    Entry,
    Live,
    MiniScheduler,
    make_capacity,
    make_plan,
    make_sequence,
)

EOS = 99


@pytest.fixture
def scheduler() -> MiniScheduler:
    return MiniScheduler(ReplayExecutor(make_capacity()))


def script(*ids: int, sizes: tuple[int, ...] = (1,)) -> ReplayScript:
    return ReplayScript(token_ids=ids, tokens_per_step=sizes)


def play(scheduler: MiniScheduler, replay: ReplayScript | None, **sampling: object) -> Live:
    sampling = {"eos_token_ids": (EOS,), "max_tokens": 30} | sampling
    one = scheduler.add([1, 2, 3], script=replay, **sampling)
    scheduler.run()
    return one


def test_a_script_is_emitted_and_then_the_primary_eos(scheduler: MiniScheduler) -> None:
    one = play(scheduler, script(5, 6, 7))
    assert one.outputs == [5, 6, 7, EOS]
    assert one.code == FinishCode.EOS
    assert scheduler.step == 4


def test_several_tokens_per_step_are_cycled(scheduler: MiniScheduler) -> None:
    one = scheduler.add(
        [1], script=script(*range(10), sizes=(1, 3)), eos_token_ids=(EOS,), max_tokens=30
    )
    counts = []
    while scheduler.live:
        counts += scheduler.run_step().num_sampled_tokens.tolist()
    assert counts == [1, 3, 1, 3, 1, 2]
    assert one.outputs == [*range(10), EOS]


def test_an_empty_script_is_eos_alone(scheduler: MiniScheduler) -> None:
    assert play(scheduler, script()).outputs == [EOS]


def test_max_tokens_cuts_inside_a_step(scheduler: MiniScheduler) -> None:
    one = play(scheduler, script(5, 6, 7, 8, sizes=(3,)), max_tokens=2)
    assert one.outputs == [5, 6]
    assert one.code == FinishCode.MAX_TOKENS


def test_stop_ids_end_a_replay(scheduler: MiniScheduler) -> None:
    one = play(scheduler, script(5, 6, 7), stop_token_ids=(6,))
    assert one.outputs == [5, 6]
    assert one.code == FinishCode.STOP_TOKEN


def test_the_context_length_ends_a_replay(scheduler: MiniScheduler) -> None:
    one = play(scheduler, script(*[5] * 90), max_tokens=90)
    assert len(one.outputs) == 40 - 3
    assert one.code == FinishCode.MAX_MODEL_LEN


def test_a_chunked_prompt_emits_nothing_before_its_last_chunk() -> None:
    scheduler = MiniScheduler(ReplayExecutor(make_capacity()), chunk=2)
    scheduler.add([1, 2, 3, 4, 5], script=script(7), eos_token_ids=(EOS,))
    counts = [scheduler.run_step().num_sampled_tokens.tolist() for _ in range(3)]
    assert counts == [[0], [0], [1]]


@pytest.mark.parametrize("num_before", range(1, 8))
def test_a_preempted_replay_goes_on_where_it_was(scheduler: MiniScheduler, num_before: int) -> None:
    one = scheduler.add(
        [1, 2], script=script(*range(10, 17), sizes=(2, 1)), eos_token_ids=(EOS,), max_tokens=30
    )
    while len(one.outputs) < num_before:
        scheduler.run_step()
    if not one.is_done:
        scheduler.preempt(one)
    scheduler.run()
    assert one.outputs == [*range(10, 17), EOS]


@pytest.mark.parametrize(
    ("replay", "sampling", "field"),
    [
        (None, {}, "replay"),
        (script(5), {"eos_token_ids": ()}, "eos_token_ids"),
        (script(100), {}, "replay.token_ids"),
        (script(5, sizes=(1, 0)), {}, "replay.tokens_per_step"),
        (script(5, sizes=(2000,)), {}, "replay.tokens_per_step"),
    ],
)
def test_a_bad_script_fails_its_row_alone(
    scheduler: MiniScheduler, replay: ReplayScript | None, sampling: dict, field: str
) -> None:
    good = scheduler.add([1], script=script(5), eos_token_ids=(EOS,))
    bad = play(scheduler, replay, **sampling)
    assert bad.error is not None
    assert bad.error.reason is FailureReason.INVALID_ARGUMENT
    assert bad.error.field == field
    assert bad.outputs == []
    assert good.outputs == [5, EOS]


def test_logprobs_of_a_replay_are_certain(scheduler: MiniScheduler) -> None:
    play(scheduler, script(5), num_logprobs=2)
    columns = scheduler.logprobs[0]
    assert columns.sampled_logprobs.tolist() == [0.0]
    assert columns.sampled_ranks.tolist() == [1]
    assert columns.top_token_ids.tolist() == [5]
    assert columns.num_top_logprobs.tolist() == [1]


def test_logprobs_cover_only_rows_that_asked(scheduler: MiniScheduler) -> None:
    scheduler.add([1], script=script(5), eos_token_ids=(EOS,))
    scheduler.add([1], script=script(6), eos_token_ids=(EOS,), num_logprobs=0)
    columns = None
    columns = scheduler.run_step().logprobs
    assert len(columns.sampled_logprobs) == 1
    assert columns.num_top_logprobs.tolist() == [0]


def test_a_plan_for_an_ended_row_repeats_its_end_and_adds_nothing() -> None:
    executor = ReplayExecutor(make_capacity())
    executor.start_epoch(2)
    new = make_sequence(0, [1], script=script(), eos_token_ids=(EOS,))
    executor.execute(make_plan(1, {0: Entry(blocks=(1,))}, new=[new]), 0)
    result = executor.execute(make_plan(2, {0: Entry(computed=1)}), 0)
    assert result.num_sampled_tokens.tolist() == [0]
    assert result.finish_codes.tolist() == [FinishCode.EOS]
    assert result.num_computed_tokens.tolist() == [1]


def test_every_row_is_free_after_the_run(scheduler: MiniScheduler) -> None:
    play(scheduler, script(5))
    scheduler.run_step()
    assert scheduler.executor.num_rows_in_use() == 0


def test_a_new_epoch_frees_every_row(scheduler: MiniScheduler) -> None:
    scheduler.add([1], script=script(5), eos_token_ids=(EOS,))
    scheduler.run_step()
    assert scheduler.executor.num_rows_in_use() == 1
    scheduler.executor.start_epoch(1)
    assert scheduler.executor.num_rows_in_use() == 0
