"""Steps with drafts give the tokens of steps without, only fewer of them.

The drafts of these tests are right at a chosen share of all contexts, so runs of every length come
up; what `FakeDrafter` is asked is checked as it goes.
"""

import math
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.worker.plan import FinishCode, LogprobColumns
from shared.errors import FailureReason
from tests.services.worker.drafting_cases import PROMPTS, SAMPLINGS
from tests.services.worker.fake_decoder import FakeDrafter, make_executor
from tests.services.worker.plans import Entry, Live, MiniScheduler, make_plan, make_sequence

DRAFTS = [1, 2, 3, 5]
BIG = {"num_blocks": 200, "max_num_batched_tokens": 200, "max_num_seqs": 8, "num_rows": 16}


def run(
    num_drafts: int, indices: list[int] | range, *, chunk: int = 1000, **options: Any
) -> tuple[list[Live], MiniScheduler]:
    executor = make_executor(**(BIG | {"num_speculative_tokens": num_drafts} | options))
    scheduler = MiniScheduler(executor, chunk=chunk)
    lives = [scheduler.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index]) for index in indices]
    scheduler.run()
    assert [one.error for one in lives] == [None] * len(lives)
    return lives, scheduler


def outputs(lives: list[Live]) -> list[list[int]]:
    return [one.outputs for one in lives]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The tokens without drafts."""
    return outputs(run(0, range(8))[0])


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("num_drafts", DRAFTS)
def test_tokens_do_not_depend_on_drafts(
    num_drafts: int, chunk: int, multiple: int, plain: list[list[int]]
) -> None:
    lives, _ = run(num_drafts, range(8), chunk=chunk, row_multiple=multiple)
    assert outputs(lives) == plain
    assert sum(accepted for one in lives for _, accepted in one.drafted) > 0


@pytest.mark.parametrize("skill", [0.0, 0.5, 1.0])
def test_tokens_do_not_depend_on_how_good_drafts_are(skill: float, plain: list[list[int]]) -> None:
    lives, _ = run(3, range(8), skill=skill)
    assert outputs(lives) == plain
    accepted = [kept for one in lives for _, kept in one.drafted]
    assert (max(accepted) > 0) == (skill > 0)


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("chunk", [2, 1000])
def test_every_right_draft_is_kept(num_drafts: int, chunk: int) -> None:
    """Greedy rows alone: how many steps they take follows from where drafts are right."""
    for index in (0, 4, 6):
        sampling = {"temperature": 0.0}
        executor = make_executor(**BIG, num_speculative_tokens=num_drafts, skill=0.7)
        scheduler = MiniScheduler(executor, chunk=chunk)
        one = scheduler.add(PROMPTS[index], max_tokens=20, **sampling)
        scheduler.run()
        drafter = executor._decoder
        assert isinstance(drafter, FakeDrafter)
        tokens, place, steps = PROMPTS[index] + one.outputs, len(PROMPTS[index]) + 1, 1
        while place < len(tokens):
            room = min(num_drafts, len(tokens) - 1 - place)
            kept = 0
            while kept < room and drafter.is_right(tokens[: place + kept]):
                kept += 1
            assert one.drafted[steps] == (room, kept)
            place += kept + 1
            steps += 1
        assert len(one.drafted) == steps


def test_right_drafts_make_few_steps() -> None:
    lives, _ = run(3, [0], skill=1.0)
    # The prompt, then four tokens a step.
    assert lives[0].num_steps == 1 + math.ceil(14 / 4)


def test_drafts_end_where_the_sequence_must_end(plain: list[list[int]]) -> None:
    lives, _ = run(5, range(8), skill=1.0)
    for one, expected in zip(lives, plain, strict=True):
        assert one.outputs == expected
        assert all(drafted >= accepted for drafted, accepted in one.drafted)
    greedy = lives[0]
    assert greedy.code == FinishCode.MAX_TOKENS
    assert [drafted for drafted, _ in greedy.drafted] == [0, 5, 5, 1]


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
@pytest.mark.parametrize("limit", [9, 10, 11, 12, 13, 14])
def test_a_sequence_stops_at_max_model_len_exactly(num_drafts: int, limit: int) -> None:
    lives, _ = run(num_drafts, [0], skill=1.0, max_model_len=limit)
    assert len(PROMPTS[0]) + len(lives[0].outputs) == limit
    assert lives[0].code == FinishCode.MAX_MODEL_LEN
    assert lives[0].outputs == outputs(run(0, [0])[0])[0][: limit - len(PROMPTS[0])]


@pytest.mark.parametrize("place", range(1, 9))
def test_a_stop_id_inside_a_run_cuts_it(place: int) -> None:
    whole = outputs(run(0, [0])[0])[0]
    stop = whole[place]
    executor = make_executor(**BIG, num_speculative_tokens=5, skill=1.0)
    scheduler = MiniScheduler(executor)
    one = scheduler.add(
        PROMPTS[0], max_tokens=15, temperature=0.0, stop_token_ids=(stop,), num_logprobs=1
    )
    scheduler.run()
    assert one.outputs == whole[: whole.index(stop) + 1]
    assert one.code == FinishCode.STOP_TOKEN
    num_logprobs = [len(each.sampled_ranks) for each in scheduler.logprobs if each is not None]
    assert sum(num_logprobs) == len(one.outputs)


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_inside_a_run_cuts_it(max_tokens: int) -> None:
    whole = outputs(run(0, [0])[0])[0]
    executor = make_executor(**BIG, num_speculative_tokens=5, skill=1.0)
    scheduler = MiniScheduler(executor)
    one = scheduler.add(PROMPTS[0], max_tokens=max_tokens, temperature=0.0)
    scheduler.run()
    assert one.outputs == whole[:max_tokens]


def test_min_tokens_holds_inside_a_run() -> None:
    def prefer_stop(logits: Tensor) -> None:
        logits[:, 3] = 20.0

    expected = []
    for num_drafts in (0, 5):
        executor = make_executor(**BIG, num_speculative_tokens=num_drafts, skill=0.5)
        executor._decoder.change = prefer_stop
        scheduler = MiniScheduler(executor)
        one = scheduler.add(
            PROMPTS[2], max_tokens=15, min_tokens=7, stop_token_ids=(3,), temperature=0.0
        )
        scheduler.run()
        assert len(one.outputs) == 8
        expected.append(one.outputs)
    assert expected[0] == expected[1]


@pytest.mark.parametrize("num_drafts", DRAFTS)
def test_logprobs_are_those_of_a_run_without_drafts(num_drafts: int) -> None:
    found = []
    for count in (0, num_drafts):
        _, scheduler = run(count, [6], skill=0.8)
        found.append(_joined([each for each in scheduler.logprobs if each is not None]))
    for before, after in zip(*found, strict=True):
        np.testing.assert_array_equal(before, after)


def _joined(columns: list[LogprobColumns]) -> list[np.ndarray]:
    names = ("sampled_logprobs", "sampled_ranks", "num_top_logprobs", "top_token_ids")
    return [np.concatenate([getattr(each, name) for each in columns]) for name in names]


def test_logprobs_of_several_rows_come_in_plan_order() -> None:
    lives, scheduler = run(3, [6, 0, 7])
    columns = [each for each in scheduler.logprobs if each is not None]
    alone = [run(0, [index])[1].logprobs for index in (6, 7)]
    total = sum(len(each.sampled_ranks) for each in columns)
    assert total == len(lives[0].outputs) + len(lives[2].outputs)
    # Alternatives are asked for by the first alone.
    tops = np.concatenate([each.top_token_ids for each in columns])
    np.testing.assert_array_equal(tops, _joined(alone[0])[3])


@pytest.mark.parametrize("index", range(8))
@pytest.mark.parametrize("num_before", [1, 4, 9])
def test_a_resumed_sequence_continues_with_the_same_tokens(
    index: int, num_before: int, plain: list[list[int]]
) -> None:
    executor = make_executor(**BIG, num_speculative_tokens=3)
    scheduler = MiniScheduler(executor, chunk=4)
    one = scheduler.add(PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    while len(one.outputs) < num_before and not one.is_done:
        scheduler.run_step()
    if not one.is_done:
        scheduler.preempt(one)
    scheduler.run()
    assert one.outputs == plain[index]


def test_a_row_with_broken_numbers_fails_alone(plain: list[list[int]]) -> None:
    executor = make_executor(**BIG, num_speculative_tokens=3, skill=1.0)
    scheduler = MiniScheduler(executor)
    lives = [scheduler.add(PROMPTS[i], max_tokens=15, **SAMPLINGS[i]) for i in range(3)]
    scheduler.run_step()

    def break_second(logits: Tensor) -> None:
        logits[4, 7] = math.nan  # behind the second row's last known token

    executor._decoder.change = break_second
    scheduler.run_step()
    executor._decoder.change = lambda logits: None
    scheduler.run()
    assert lives[1].error is not None
    assert lives[1].error.reason is FailureReason.NUMERICAL_ERROR
    assert lives[1].outputs == plain[1][:1]
    assert [lives[0].outputs, lives[2].outputs] == [plain[0], plain[2]]


def test_broken_numbers_behind_a_rejected_draft_do_no_harm(plain: list[list[int]]) -> None:
    executor = make_executor(**BIG, num_speculative_tokens=2, skill=0.0)
    scheduler = MiniScheduler(executor)
    one = scheduler.add(PROMPTS[0], max_tokens=15, **SAMPLINGS[0])
    scheduler.run_step()

    def break_drafts(logits: Tensor) -> None:
        logits[1:] = math.nan

    executor._decoder.change = break_drafts
    scheduler.run_step()
    executor._decoder.change = lambda logits: None
    scheduler.run()
    assert one.outputs == plain[0]


def test_blocks_bound_the_drafts_of_a_row() -> None:
    """A plan that brings no block for drafts gets fewer of them, not an error."""
    executor = make_executor(**BIG, num_speculative_tokens=3, skill=1.0)
    new = make_sequence(0, [1, 2, 3], max_tokens=20, temperature=0.0)
    executor.execute(make_plan(1, {0: Entry(scheduled=3, blocks=(1,))}, new=[new]), 0)
    result = executor.execute(make_plan(2, {0: Entry(scheduled=4, computed=3)}), 0)
    assert result.num_drafted_tokens.tolist() == [0]
    assert result.num_sampled_tokens.tolist() == [1]
    plan = make_plan(3, {0: Entry(scheduled=4, computed=4, blocks=(2,))})
    assert executor.execute(plan, 0).num_drafted_tokens.tolist() == [1]


def test_a_plan_may_order_fewer_drafts_than_there_are() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=3, skill=1.0)
    new = make_sequence(0, [1, 2, 3], max_tokens=20, temperature=0.0)
    executor.execute(make_plan(1, {0: Entry(scheduled=3, blocks=(1, 2, 3))}, new=[new]), 0)
    result = executor.execute(make_plan(2, {0: Entry(scheduled=2, computed=3)}), 0)
    assert result.num_sampled_tokens.tolist() == [2]
    assert result.num_drafted_tokens.tolist() == [1]
    assert result.num_accepted_tokens.tolist() == [1]


@pytest.mark.parametrize("index", [0, 1, 4])
def test_two_plans_in_flight_give_the_tokens_of_one(index: int, plain: list[list[int]]) -> None:
    """Every plan is made before the result of the one before it and counts its least progress."""
    executor = make_executor(**BIG, num_speculative_tokens=3)
    executor.start_epoch(2)
    size = len(PROMPTS[index])
    new = make_sequence(0, PROMPTS[index], max_tokens=15, **SAMPLINGS[index])
    blocks = tuple(range(1, 11))
    plan = make_plan(1, {0: Entry(scheduled=size, blocks=blocks)}, new=[new])
    result = executor.execute(plan, 0)
    tokens, least, step = result.sampled_token_ids.tolist(), size, 1
    while not result.finish_codes[0]:
        step += 1
        result = executor.execute(make_plan(step, {0: Entry(scheduled=4, computed=least)}), 0)
        # All that the plan after the next will know, and one token for the next.
        least = size + len(tokens)
        tokens += result.sampled_token_ids.tolist()
    assert tokens == plain[index]
    assert step < 15 or index == 1


def test_a_step_that_samples_nothing_still_feeds_the_drafts() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=2)
    scheduler = MiniScheduler(executor, chunk=2)
    scheduler.add([1, 2, 3, 4, 5], max_tokens=1)
    scheduler.run()
    executor.finish_step()
    drafter = executor._decoder
    assert isinstance(drafter, FakeDrafter)
    assert drafter.num_passes == 3
    assert drafter.num_head_rows == [1]


def test_an_empty_plan_has_empty_draft_columns() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=2)
    result = executor.execute(make_plan(1, {}), 0)
    assert len(result.num_drafted_tokens) == len(result.num_accepted_tokens) == 0


def test_the_time_of_drafting_is_told() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=2)
    new = make_sequence(0, [1, 2], max_tokens=9)
    plan = make_plan(1, {0: Entry(scheduled=2, blocks=(1, 2))}, new=[new])
    assert executor.execute(plan, 0).timings.draft_us == 0
    executor.finish_step()
    plan = make_plan(2, {0: Entry(scheduled=3, computed=2)})
    assert executor.execute(plan, 0).timings.draft_us > 0


def test_drafts_are_proposed_after_the_result_and_once() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=3)
    drafter = executor._decoder
    assert isinstance(drafter, FakeDrafter)
    new = make_sequence(0, [1, 2], max_tokens=9, temperature=0.0)
    executor.execute(make_plan(1, {0: Entry(scheduled=2, blocks=(1, 2, 3))}, new=[new]), 0)
    assert drafter.num_passes == 0
    executor.finish_step()
    executor.finish_step()
    assert drafter.num_passes == 3
    # Nobody need ask: the next step makes up for it.
    executor.execute(make_plan(2, {0: Entry(scheduled=4, computed=2)}), 0)
    assert drafter.num_passes == 3
    executor.execute(make_plan(3, {}), 0)
    assert drafter.num_passes == 6


def test_what_fails_while_proposing_fails_again_with_the_next_step() -> None:
    executor = make_executor(**BIG, num_speculative_tokens=1)
    drafter = executor._decoder
    new = make_sequence(0, [1, 2], max_tokens=9)
    executor.execute(make_plan(1, {0: Entry(scheduled=2, blocks=(1, 2))}, new=[new]), 0)

    def broken(*_: object) -> Tensor:
        raise ZeroDivisionError

    drafter.draft = broken
    with pytest.raises(ZeroDivisionError):
        executor.finish_step()
    with pytest.raises(ZeroDivisionError):
        executor.execute(make_plan(2, {0: Entry(scheduled=2, computed=2)}), 0)
    executor.start_epoch(1)
    executor.finish_step()
    assert executor.execute(make_plan(1, {}), 0).failure is None


def test_sampled_text_keeps_its_distribution() -> None:
    """Two unseeded tokens behind one prompt, drafted or not, counted over many sequences.

    Drafts are greedy and right or wrong at random, so that a rule that favours them would show. The
    sum of (observed - expected)^2 / expected over C cells has mean C - 1 and deviation
    sqrt(2 (C - 1)); four deviations above the mean is a bound of about 1 in 10,000, and seeds are
    fixed, so the test does not flicker.
    """
    vocab, count = 6, 3000
    pairs = {}
    for num_drafts in (0, 2):
        executor = make_executor(
            num_speculative_tokens=num_drafts,
            skill=0.5,
            vocab_size=vocab,
            num_known_ids=vocab,
            num_blocks=60,
            max_num_seqs=10,
            num_rows=20,
            max_num_batched_tokens=60,
        )
        scheduler = MiniScheduler(executor)
        pairs[num_drafts] = np.zeros((vocab, vocab))
        for start in range(0, count, 10):
            lives = [
                scheduler.add(
                    [1, 2, 3], max_tokens=3, temperature=1.5, seed=1000 * num_drafts + start + i
                )
                for i in range(10)
            ]
            scheduler.run()
            for one in lives:
                pairs[num_drafts][one.outputs[1], one.outputs[2]] += 1
    expected = _pair_distribution(vocab, temperature=1.5) * count
    for observed in pairs.values():
        distance = ((observed - expected) ** 2 / expected).sum()
        freedom = vocab * vocab - 1
        assert distance < freedom + 4 * math.sqrt(2 * freedom)


def _pair_distribution(vocab: int, temperature: float) -> np.ndarray:
    """Exact probabilities of the second and third token behind the prompt."""
    decoder = make_executor(vocab_size=vocab)._decoder
    assert isinstance(decoder, FakeDrafter)

    def after(tokens: list[int]) -> np.ndarray:
        state = zlib.crc32(np.array(tokens, np.int64).tobytes()) % 1_048_573
        logits = decoder.compute_logits(torch.tensor([[float(state)]]))[0]
        return torch.softmax(logits.double() / temperature, 0).numpy()

    total = np.zeros((vocab, vocab))
    for first, weight in enumerate(after([1, 2, 3])):
        for second, share in enumerate(after([1, 2, 3, first])):
            total[second] += weight * share * after([1, 2, 3, first, second])
    return total
