import math
import random

import pytest
import torch
from torch import Tensor

from services.worker.model_executor import ModelExecutor
from services.worker.plan import FinishCode
from shared.errors import FailureReason
from shared.sampling import ReplayScript
from tests.services.worker.fake_decoder import FakeDecoder, make_executor
from tests.services.worker.plans import Entry, MiniScheduler, make_plan, make_sequence

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.3, "seed": 2**63 + 7, "top_p": 0.8},
    {"temperature": 0.8, "seed": 1, "top_k": 7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 9, "min_p": 0.05, "min_tokens": 6, "stop_token_ids": (3, 4)},
]
PROMPTS = [[random.Random(i).randrange(100) for _ in range(3 + 2 * i)] for i in range(6)]


def decoder_of(executor: ModelExecutor[Tensor]) -> FakeDecoder:
    decoder = executor._decoder
    assert isinstance(decoder, FakeDecoder)
    return decoder


def alone(index: int, **executor: int) -> list[int]:
    scheduler = MiniScheduler(make_executor(**executor))
    one = scheduler.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    scheduler.run()
    assert one.error is None
    return one.outputs


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_tokens_do_not_depend_on_chunks_or_neighbours(chunk: int, multiple: int) -> None:
    scheduler = MiniScheduler(make_executor(row_multiple=multiple), chunk=chunk)
    lives = [
        scheduler.add(prompt, max_tokens=15, **sampling)
        for prompt, sampling in zip(PROMPTS[:4], SAMPLINGS[:4], strict=True)
    ]
    scheduler.run()
    assert [one.outputs for one in lives] == [alone(index) for index in range(4)]


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("num_before", [1, 4, 11])
def test_a_resumed_sequence_continues_with_the_same_tokens(index: int, num_before: int) -> None:
    scheduler = MiniScheduler(make_executor(), chunk=4)
    one = scheduler.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    while len(one.outputs) < num_before and not one.is_done:
        scheduler.run_step()
    if not one.is_done:
        scheduler.preempt(one)
    scheduler.run()
    assert one.outputs == alone(index)


def test_two_plans_in_flight_give_the_tokens_of_one() -> None:
    expected = alone(1)
    executor = make_executor()
    executor.start_epoch(2)
    new = make_sequence(0, PROMPTS[1], max_tokens=15, **SAMPLINGS[1])
    size = len(PROMPTS[1])
    plan = make_plan(1, {0: Entry(scheduled=size, blocks=tuple(range(1, 7)))}, new=[new])
    tokens = executor.execute(plan, 0).sampled_token_ids.tolist()
    # Every later plan was made without the result of the one before it.
    confirmed = [0, *range(size, 40)]
    for step in range(2, 16):
        plan = make_plan(step, {0: Entry(computed=confirmed[step - 2])})
        tokens += executor.execute(plan, 0).sampled_token_ids.tolist()
    assert tokens == expected


def test_a_row_that_finished_in_a_plan_in_flight_is_padding_in_the_next() -> None:
    executor = make_executor()
    executor.start_epoch(2)
    new = make_sequence(0, [1, 2], max_tokens=1)
    executor.execute(make_plan(1, {0: Entry(scheduled=2, blocks=(1,))}, new=[new]), 0)
    result = executor.execute(make_plan(2, {0: Entry(computed=0)}), 0)
    assert result.num_sampled_tokens.tolist() == [0]
    assert result.finish_codes.tolist() == [FinishCode.MAX_TOKENS]
    assert len(decoder_of(executor).steps) == 1


def test_a_row_with_broken_numbers_fails_alone() -> None:
    executor = make_executor()
    scheduler = MiniScheduler(executor)

    def break_second(logits: Tensor) -> None:
        logits[1, 7] = math.nan

    decoder_of(executor).change = break_second
    lives = [scheduler.add(PROMPTS[i], max_tokens=15, **SAMPLINGS[i]) for i in range(3)]
    scheduler.run_step()
    decoder_of(executor).change = lambda logits: None
    scheduler.run()
    assert lives[1].error is not None
    assert lives[1].error.reason is FailureReason.NUMERICAL_ERROR
    assert lives[1].outputs == []
    assert lives[0].outputs == alone(0)
    assert lives[2].outputs == alone(2)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 1, 4])
def test_any_kind_of_broken_logits_is_noticed(value: float, index: int) -> None:
    executor = make_executor()

    def break_all(logits: Tensor) -> None:
        logits[:] = value

    decoder_of(executor).change = break_all
    scheduler = MiniScheduler(executor)
    one = scheduler.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    scheduler.run()
    assert one.error is not None
    assert one.error.reason is FailureReason.NUMERICAL_ERROR


def test_a_failed_row_repeats_its_failure_until_it_is_freed() -> None:
    executor = make_executor()
    executor.start_epoch(2)
    new = make_sequence(0, [1, 2], temperature=-1.0)
    first = executor.execute(make_plan(1, {0: Entry(scheduled=2, blocks=(1,))}, new=[new]), 0)
    second = executor.execute(make_plan(2, {0: Entry(computed=0)}, freed=[0]), 0)
    third = executor.execute(make_plan(3, {}), 0)
    assert [len(r.row_failures) for r in (first, second, third)] == [1, 1, 0]
    assert first.row_failures[0].error.field == "temperature"


def test_a_script_is_refused_in_model_mode() -> None:
    scheduler = MiniScheduler(make_executor())
    one = scheduler.add([1], script=ReplayScript(token_ids=(5,)))
    scheduler.run()
    assert one.error is not None
    assert one.error.reason is FailureReason.FEATURE_DISABLED


def test_ids_past_the_tokenizer_are_never_sampled() -> None:
    executor = make_executor(num_known_ids=90)

    def prefer_unknown(logits: Tensor) -> None:
        logits[:, 90:] = 50.0

    decoder_of(executor).change = prefer_unknown
    scheduler = MiniScheduler(executor)
    lives = [scheduler.add(PROMPTS[i], max_tokens=10, **SAMPLINGS[i]) for i in range(4)]
    scheduler.run()
    assert max(max(one.outputs) for one in lives) < 90


def test_a_chunk_that_samples_nothing_needs_no_head() -> None:
    executor = make_executor()
    scheduler = MiniScheduler(executor, chunk=2)
    scheduler.add([1, 2, 3, 4, 5], max_tokens=1)
    scheduler.run()
    assert len(decoder_of(executor).steps) == 3
    assert decoder_of(executor).num_head_rows == [1]


def test_a_plan_without_rows_computes_nothing_and_frees() -> None:
    executor = make_executor()
    new = make_sequence(0, [1, 2], max_tokens=9)
    executor.execute(make_plan(1, {0: Entry(scheduled=2, blocks=(1,))}, new=[new]), 0)
    assert executor.num_rows_in_use() == 1
    result = executor.execute(make_plan(2, {}, freed=[0]), 0)
    assert executor.num_rows_in_use() == 0
    assert result.rows.tolist() == []
    assert len(decoder_of(executor).steps) == 1


def test_a_row_takes_no_settings_of_its_predecessor() -> None:
    scheduler = MiniScheduler(make_executor(num_rows=1, max_num_seqs=1))
    scheduler.add(PROMPTS[3], max_tokens=5, **SAMPLINGS[3])
    scheduler.run()
    scheduler.run_step()
    one = scheduler.add(PROMPTS[0], max_tokens=15, **SAMPLINGS[0])
    scheduler.run()
    assert one.outputs == alone(0)


def test_min_tokens_keeps_ending_ids_away_until_it_is_reached() -> None:
    executor = make_executor()

    def prefer_stop(logits: Tensor) -> None:
        logits[:, 3] = 20.0

    decoder_of(executor).change = prefer_stop
    scheduler = MiniScheduler(executor)
    one = scheduler.add([1], max_tokens=15, min_tokens=5, stop_token_ids=(3,), temperature=0.0)
    scheduler.run()
    assert len(one.outputs) == 6
    assert one.outputs.index(3) == 5
    assert one.code == FinishCode.STOP_TOKEN


def test_logprobs_are_those_of_the_raw_logits_in_plan_order() -> None:
    executor = make_executor()
    kept: list[Tensor] = []
    decoder_of(executor).change = lambda logits: kept.append(logits.clone())
    scheduler = MiniScheduler(executor)
    scheduler.add(PROMPTS[0], max_tokens=1, temperature=0.5, repetition_penalty=2.0, seed=3)
    asked = scheduler.add(PROMPTS[1], max_tokens=1, temperature=0.5, num_logprobs=3, seed=4)
    scheduler.run()
    columns = scheduler.logprobs[0]
    expected = torch.log_softmax(kept[0][1], 0)
    token = asked.outputs[0]
    assert columns.sampled_logprobs.tolist() == pytest.approx([float(expected[token])], abs=1e-5)
    assert columns.sampled_ranks.tolist() == [1 + int((expected > expected[token]).sum())]
    assert columns.top_token_ids.tolist() == torch.topk(expected, 3).indices.tolist()


def test_timings_are_told() -> None:
    executor = make_executor()
    new = make_sequence(0, [1, 2], max_tokens=9)
    plan = make_plan(1, {0: Entry(scheduled=2, blocks=(1,))}, new=[new])
    timings = executor.execute(plan, 1234).timings
    assert timings.wait_us == 1234
    assert timings.forward_us > 0
    assert timings.sample_us > 0
