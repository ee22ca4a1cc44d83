"""The simulator: sizes, times, traces, and whole small runs of the real core."""

import json
from pathlib import Path

import pytest

from benchmarks.simulate.__main__ import main
from benchmarks.simulate.calibrate import Look, Phase, fit, predict
from benchmarks.simulate.device_time import Fitted, Roofline, StepWork
from benchmarks.simulate.hardware import DEVICES
from benchmarks.simulate.policies import Case, compare
from benchmarks.simulate.report import fairness, max_min, summarize, weighted_percentiles
from benchmarks.simulate.sizes import read_sizes
from benchmarks.simulate.traces import TRACES, Conversation, Load, Turn, tokens
from benchmarks.simulate.world import Served, World
from services.scheduler.limits import CoreConfig
from services.scheduler.plan import Capacity

CAPACITY = Capacity(
    num_blocks=400,
    block_size_tokens=128,
    num_rows=64,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_model_len=100_000,
)
DEVICE = Fitted(capacity=CAPACITY, per_step_s=0.02, per_row_s=1e-4, per_prompt_token_s=1e-5)


def decode(rows: int, context: int = 2000) -> StepWork:
    return StepWork(
        num_rows=rows, num_tokens=rows, num_context_tokens=rows * context, num_prompt_tokens=0
    )


def test_sizes_are_those_of_the_published_model() -> None:
    sizes = read_sizes()
    assert sizes.num_weights / 1e9 == pytest.approx(744, abs=1)
    assert (sizes.dense_weights + sizes.routed_weights) / 1e9 == pytest.approx(41, abs=1)
    assert 2 * sizes.cache_values == 95_232


@pytest.mark.parametrize("hardware", ["a2", "a3"])
def test_a_step_takes_longer_the_more_it_has_to_do(hardware: str) -> None:
    device = Roofline(
        read_sizes(), DEVICES[hardware], "w4a8c8", num_devices=8, num_expert_devices=16
    )
    times = [device.seconds(decode(rows)) for rows in (1, 16, 64, 128)]
    assert times == sorted(times)
    assert device.seconds(decode(64, 100_000)) > device.seconds(decode(64))
    chunk = StepWork(num_rows=1, num_tokens=8192, num_context_tokens=8192, num_prompt_tokens=8192)
    assert device.seconds(chunk) > times[-1]
    assert 0.005 < times[0] < 0.05, "one token: some ten milliseconds"


def test_weights_that_leave_no_room_for_blocks_are_told() -> None:
    with pytest.raises(SystemExit, match="more devices"):
        Roofline(read_sizes(), DEVICES["a3"], "bf16", num_devices=8, num_expert_devices=8)


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_follows_from_its_seed(name: str) -> None:
    load = Load(rate=5, seconds=20, seed=3)
    assert TRACES[name](load) == TRACES[name](load)
    assert TRACES[name](load) != TRACES[name](Load(rate=5, seconds=20, seed=4))
    assert all(0 <= c.arrives_at < 20 for c in TRACES[name](load))


@pytest.mark.parametrize("name", ["poisson", "agents", "tenants"])
@pytest.mark.parametrize("num_replicas", [1, 3])
def test_every_request_of_a_run_is_served_whole(name: str, num_replicas: int) -> None:
    conversations = TRACES[name](Load(rate=2, seconds=4))
    outcome = World(CoreConfig(max_plans_in_flight=2), DEVICE, num_replicas).run(conversations)
    num_turns = sum(len(c.turns) for c in conversations)
    assert len(outcome.served) == num_turns
    wanted = sorted(t.num_output_tokens for c in conversations for t in c.turns)
    assert sorted(s.num_output_tokens for s in outcome.served) == wanted
    assert (outcome.load.num_running, outcome.load.num_waiting) == (0, 0)
    assert outcome.scheduler_s > 0


def test_the_turns_of_a_conversation_hit_what_was_said_before() -> None:
    turn = Turn(num_new_tokens=300, num_output_tokens=100)
    talk = Conversation(arrives_at=0.0, turns=[turn] * 3, prefix=tokens(1, 1000))
    outcome = World(CoreConfig(), DEVICE).run([talk])
    assert [s.num_cached_tokens for s in outcome.served] == [0, 1280, 1792]


def test_a_run_takes_what_its_steps_take() -> None:
    turn = Turn(num_new_tokens=100, num_output_tokens=11)
    talk = Conversation(arrives_at=0.0, turns=[turn])
    outcome = World(CoreConfig(), DEVICE, cost_factor=0.0, message_s=0.0).run([talk])
    (served,) = outcome.served
    assert served.first_token_at == pytest.approx(0.02 + 1e-4 + 100 * 1e-5)
    assert served.ended_at == pytest.approx(11 * (0.02 + 1e-4) + 100 * 1e-5)
    line = summarize(outcome, 1.0, 1)
    assert line["tpot_ms"] == {"p50": 20.1, "p90": 20.1, "p99": 20.1}
    assert line["done"] == 1


def test_the_schedulers_own_cost_is_charged() -> None:
    talks = TRACES["short"](Load(rate=40, seconds=2))
    free, dear = (
        World(CoreConfig(), DEVICE, cost_factor=factor).run(talks).ended_at for factor in (0, 500)
    )
    assert dear > 1.2 * free


def test_fair_is_what_everybody_gets_of_its_due() -> None:
    assert max_min({"a": 10, "b": 100, "c": 100}, 110) == {"a": 10, "b": 50, "c": 50}

    def served(tenant: str, size: int, *, is_done: bool) -> Served:
        found = Served(tenant, 0, 0.0, size - 1, num_output_tokens=1)
        found.ended_at = 1.0 if is_done else None
        return found

    even = [served(t, 100, is_done=True) for t in "ab"]
    assert fairness(even, 9.0) == pytest.approx(1.0)
    one = [*(served("a", 100, is_done=True) for _ in range(4)), served("b", 400, is_done=False)]
    assert fairness(one, 9.0) == pytest.approx(0.5, abs=0.01)


def test_percentiles_count_a_value_as_often_as_it_weighs() -> None:
    assert weighted_percentiles([(0.001, 98), (0.5, 2)]) == {"p50": 1.0, "p90": 1.0, "p99": 500.0}


def phase(device: Fitted, num_prompt: int) -> Phase:
    """What 28 requests would show of a device."""
    looks = [Look(float(number), 0, 0, 0, 400) for number in range(2)]
    for number in range(1, 41):
        steps, rows = 8, 8 * (number % 9)
        prompts = 28 * num_prompt // 40
        work = StepWork(
            num_rows=rows,
            num_tokens=0,
            num_context_tokens=round(prompts * num_prompt / 2 + rows * (num_prompt + 44 / 2)),
            num_prompt_tokens=prompts,
            num_prompt_context_tokens=round(prompts * num_prompt / 2),
        )
        seconds = device.seconds(work) + (steps - 1) * device.per_step_s
        last = looks[-1]
        looks.append(
            Look(
                last.at + seconds,
                last.num_steps + steps,
                last.num_prompt_tokens + prompts,
                last.num_output_tokens + rows,
                400,
            )
        )
    return Phase([*looks, looks[-1]], 28)


def test_a_fit_finds_the_device_that_was_measured() -> None:
    known = Fitted(
        capacity=CAPACITY,
        per_step_s=0.02,
        per_row_s=1e-4,
        per_prompt_token_s=1e-5,
        per_context_token_s=1e-7,
        per_row_context_token_s=2e-7,
    )
    found = fit([phase(known, num_prompt) for num_prompt in (100, 400, 1000)])
    for name in ("step", "row", "prompt_token", "context_token", "row_context_token"):
        assert getattr(found, f"per_{name}_s") == pytest.approx(getattr(known, f"per_{name}_s"))


def test_a_prediction_is_what_clients_of_that_device_would_get() -> None:
    line = predict(DEVICE, num_prompt=100, front_s=0.0)
    # 32 clients in step: every step has 32 rows.
    assert line["output_tokens_per_s"] == pytest.approx(32 / (0.02 + 32e-4), rel=0.05)


def test_a_run_is_a_line_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chart = tmp_path / "run.svg"
    flags = ["--trace", "poisson", "--rate", "4", "--seconds", "4", "--replicas", "2"]
    assert main([*flags, "--chart", str(chart)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["done"] == line["requests"] > 0
    assert {"output_tokens_per_s", "ttft_ms", "tpot_ms", "hit_rate", "preemptions", "jain"} <= {
        *line
    }
    assert "<svg" in chart.read_text()


def test_policies_are_compared_on_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    cases = tuple(
        Case(
            name=policy,
            trace="urgent",
            rate=30,
            seconds=8,
            config=CoreConfig(policy=policy, max_num_seqs=16),
        )
        for policy in ("fcfs", "priority")
    )
    fcfs, priority = compare(None, cases)
    assert fcfs["requests"] == priority["requests"]
    late, early = fcfs["ttft_ms_urgent"], priority["ttft_ms_urgent"]
    assert isinstance(late, dict)
    assert isinstance(early, dict)
    assert early["p90"] < late["p90"] / 2
    assert len(capsys.readouterr().out.splitlines()) == 2
