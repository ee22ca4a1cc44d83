"""The simulator's worlds: replicas that step together, drafts, and what messages cost."""

import dataclasses
import json
from collections.abc import Sequence

import pytest

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.device_time import Fitted, Roofline, StepWork
from benchmarks.simulate.hardware import DEVICES
from benchmarks.simulate.intervals import Offer, compare_intervals
from benchmarks.simulate.messages import measure
from benchmarks.simulate.sizes import read_sizes
from benchmarks.simulate.traces import TRACES, Conversation, Load, Turn
from benchmarks.simulate.worker import works_of
from benchmarks.simulate.world import Outcome, World
from services.scheduler.limits import CoreConfig
from services.scheduler.plan import Capacity, StepPlan, Tick
from services.scheduler.plan_builder import PlanBuilder

CAPACITY = Capacity(
    num_blocks=400,
    block_size_tokens=128,
    num_rows=64,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len=100_000,
    moe_methods=((2048, 1),),
    captured_num_seqs=(1, 4, 8, 32),
)
# A token of a prompt takes a millisecond: a prompt makes a step a long one.
DEVICE = Fitted(capacity=CAPACITY, per_step_s=0.01, per_row_s=0.0, per_prompt_token_s=1e-3)
FREE = {"cost_factor": 0.0, "message_s": 0.0}


def asked(at: float, num_prompt: int, num_output: int) -> Conversation:
    turn = Turn(num_new_tokens=num_prompt, num_output_tokens=num_output)
    return Conversation(arrives_at=at, turns=[turn])


def run(
    talks: list[Conversation], *, world_size: int = 1, interval: int = 1, num_replicas: int = 2
) -> Outcome:
    config = CoreConfig(prefill_schedule_interval=interval)
    return World(config, DEVICE, num_replicas, world_size=world_size, **FREE).run(talks)


def longest_gap(outcome: Outcome) -> float:
    return max(gap for gap, _ in outcome.gaps)


def test_a_prompt_makes_a_step_a_long_one_for_every_replica_of_its_world() -> None:
    talks = [asked(0.0, 1, 60), asked(0.1, 200, 2)]
    apart, together = run(talks), run(talks, world_size=2)
    assert [served.num_output_tokens for served in together.served] == [60, 2]
    assert longest_gap(apart) < 0.02
    assert longest_gap(together) > 0.2
    assert together.served[0].ended_at > apart.served[0].ended_at + 0.19
    assert together.num_steps > apart.num_steps, "a replica without rows steps all the same"


def test_prompts_of_a_world_come_in_every_so_manyth_step() -> None:
    """A row decodes all the while; eight prompts come one after the other."""
    talks = [asked(0.0, 1, 400), *(asked(0.05 + 0.11 * n, 50, 2) for n in range(8))]
    waits = []
    for interval in (1, 8):
        outcome = run(talks, world_size=2, interval=interval)
        firsts = [served.first_token_at - served.arrived_at for served in outcome.served[1:]]
        waits.append(sum(firsts) / len(firsts))
    # Four steps more to wait on average, of ten milliseconds.
    assert waits[1] > waits[0] + 0.02


def plan(*num_scheduled: int) -> StepPlan:
    empty = PlanBuilder(1, [], 1).build([])
    count = len(num_scheduled)
    return dataclasses.replace(
        empty,
        rows=list(range(count)),
        num_scheduled_tokens=list(num_scheduled),
        num_computed_tokens=[100] * count,
    )


def works(plans: Sequence[StepPlan], tick: Tick, num_drafts: int = 0) -> list[StepWork]:
    capacity = dataclasses.replace(CAPACITY, num_speculative_tokens=num_drafts)
    device = dataclasses.replace(DEVICE, capacity=capacity)
    return works_of([dataclasses.replace(one, tick=tick) for one in plans], device)


def test_a_captured_step_has_one_size_for_all_and_an_eager_one_is_padded_on_the_way_only() -> None:
    captured = Tick(num_tokens=4, moe_method=1, captured_num_seqs=4)
    first, second = works([plan(1, 1, 1), plan()], captured)
    assert (first.num_tokens, first.num_padded_tokens, first.is_eager) == (3, 1, False)
    assert (second.num_tokens, second.num_padded_tokens, second.num_rows) == (0, 4, 0)
    assert {first.num_world_tokens, second.num_world_tokens} == {3}
    assert {first.num_exchanged_tokens, second.num_exchanged_tokens} == {4}
    eager = Tick(num_tokens=501, moe_method=1)
    first, second = works([plan(1, 500), plan(1)], eager)
    assert (first.num_prompt_tokens, first.num_padded_tokens, first.is_eager) == (500, 0, True)
    assert (second.num_tokens, second.num_exchanged_tokens) == (1, 501)
    assert second.num_world_tokens == 502


def test_rows_with_drafts_are_decoding_ones_and_every_pass_is_counted() -> None:
    tick = Tick(num_tokens=16, moe_method=1, captured_num_seqs=4, num_draft_passes=3)
    first, _ = works([plan(4, 4, 4), plan(4)], tick, num_drafts=3)
    assert (first.num_tokens, first.num_prompt_tokens, first.num_padded_tokens) == (12, 0, 4)
    assert first.num_draft_passes == 3
    # Alone there is no tick, and three passes all the same.
    (alone,) = works_of(
        [plan(4)], dataclasses.replace(DEVICE, capacity=dataclasses.replace(
            CAPACITY, num_speculative_tokens=3))
    )  # fmt: skip
    assert (alone.num_draft_passes, alone.num_world_tokens) == (3, 0)


def test_the_roofline_charges_for_the_world_its_padding_and_its_passes() -> None:
    device = Roofline(
        read_sizes(), DEVICES["a3"], "w4a8c8", num_devices=8, num_expert_devices=32, world_size=4
    )
    some = StepWork(
        num_rows=16,
        num_tokens=16,
        num_context_tokens=16_000,
        num_prompt_tokens=0,
        num_world_tokens=64,
        num_exchanged_tokens=16,
    )
    base = device.seconds(some)
    for change in (
        {"num_world_tokens": 200},
        {"num_exchanged_tokens": 4096},
        {"num_padded_tokens": 2000},
        {"num_draft_passes": 3},
    ):
        assert device.seconds(dataclasses.replace(some, **change)) > base, change
    idle = dataclasses.replace(some, num_rows=0, num_tokens=0, num_context_tokens=0)
    assert 0 < device.seconds(idle) <= base
    # Spread over many devices a step is short: then the host's launches are what it takes.
    wide = Roofline(
        *(read_sizes(), DEVICES["a3"], "w4a8c8"),
        num_devices=64,
        num_expert_devices=256,
        world_size=4,
    )
    eager = dataclasses.replace(some, is_eager=True)
    assert wide.seconds(eager) > wide.seconds(some)
    assert device.seconds(eager) == base, "otherwise they are hidden behind the device"
    # A pass is one layer of seventy-eight, and a head.
    passes = device.seconds(dataclasses.replace(some, num_draft_passes=3)) - base
    assert passes < 3 * base / 20


def test_as_many_drafts_are_kept_as_was_said_and_the_answers_stay_the_same() -> None:
    device = dataclasses.replace(
        DEVICE, capacity=dataclasses.replace(CAPACITY, num_speculative_tokens=3)
    )
    shares = [0.9, 0.5, 0.2]
    talks = [asked(0.01 * n, 20, 100) for n in range(40)]
    config = CoreConfig(max_plans_in_flight=2)
    outcome = World(config, device, 2, world_size=2, acceptance=shares, **FREE).run(talks)
    assert [served.num_output_tokens for served in outcome.served] == [100] * 40
    load = outcome.load
    kept = [count / load.num_drafts_total for count in load.num_accepted_tokens_per_position]
    # 1,500 draws: three standard deviations are 0.04; a run that ends is cut among its drafts.
    assert load.num_drafts_total > 1200
    assert kept == pytest.approx(shares, abs=0.05)
    plain = World(config, DEVICE, 2, world_size=2, **FREE).run(talks)
    # 2.6 tokens a step in place of one.
    assert outcome.load.num_steps_total < 0.6 * plain.load.num_steps_total


def test_messages_cost_their_way_and_the_schedulers_time() -> None:
    talks = [asked(0.0, 1, 10)]
    way = World(CoreConfig(), DEVICE, cost_factor=0.0, message_s=0.005).run(talks)
    free = World(CoreConfig(), DEVICE, **FREE).run(talks)
    assert way.ended_at == pytest.approx(free.ended_at + 10 * 2 * 0.005)
    dear, cheap = (
        World(CoreConfig(), DEVICE, message_s=0.0, message_cpu_s=cost).run(talks)
        for cost in (0.01, 0.0)
    )
    # The request; ten plans, ten results and what ten of them say to the client.
    assert dear.scheduler_s - cheap.scheduler_s == pytest.approx(31 * 0.01, abs=0.02)


def test_replicas_of_a_world_serve_every_request_whole() -> None:
    talks = TRACES["poisson"](Load(rate=4, seconds=4))
    outcome = World(CoreConfig(max_plans_in_flight=2), DEVICE, 4, world_size=2).run(talks)
    wanted = sorted(t.num_output_tokens for c in talks for t in c.turns)
    assert sorted(s.num_output_tokens for s in outcome.served) == wanted
    assert (outcome.load.num_running, outcome.load.num_waiting) == (0, 0)


def test_intervals_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    offer = Offer(trace="poisson", rate=8, world_size=2, seconds=3)
    often, seldom = compare_intervals([offer], [1, 8])
    assert often["requests"] == seldom["requests"] == seldom["done"]
    assert (often["interval"], seldom["interval"]) == (1, 8)
    assert often["ttft_ms"] != seldom["ttft_ms"]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--world", "3", "--replicas", "4"], "--replicas 4 is no multiple of --world 3"),
        (["--world", "0"], "--world 0"),
        (["--world", "2", "--replicas", "2", "--expert-devices", "8"], "over its 16 devices"),
        (["--acceptance", "0.5"], "--acceptance needs --drafts"),
        (["--drafts", "2", "--acceptance", "0.5,0.6"], "--acceptance"),
        (["--drafts", "2", "--acceptance", "1.5"], "--acceptance"),
    ],
)
def test_options_that_do_not_fit_are_named(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(flags)
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


def test_options_of_a_world_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--rate", "4", "--seconds", "2", "--replicas", "4", "--world", "2"]
    lines = []
    for more in (
        ["--drafts", "3", "--acceptance", "0.9"],
        ["--drafts", "3", "--acceptance", "0"],
        ["--drafts", "3", "--acceptance", "0", "--message-us", "20000"],
    ):
        assert main([*flags, *more]) == 0
        lines.append(json.loads(capsys.readouterr().out))
    assert [line["world"] for line in lines] == [2] * 3
    assert [line["drafts"] for line in lines] == [3] * 3
    tpot = [line["tpot_ms"]["p50"] for line in lines]
    assert tpot[0] < 0.7 * tpot[1] < tpot[2]


def test_the_way_of_a_message_is_measured_between_two_processes() -> None:
    found = measure(num_rounds=10)["found"]
    assert isinstance(found, list)
    for line in found:
        assert 1 < line["one_way_us"] <= line["one_way_us_p90"]
        assert line["cpu_us_per_message"] > 1
