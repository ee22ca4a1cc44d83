"""One measured run of the CPU mesh gives the device model; a second run, unlike it, tests it.

The first run has phases: clients of several numbers, prompts of several lengths. Ten times per
second the scheduler tells how many steps, prompt tokens and output tokens there were: the seconds
between two looks are fitted as a sum of these and of what the tokens attend to, known from the
lengths in a phase. What the mesh takes of a request outside of steps is the first phase's time to
the first token with one client, less the step. The second run has another number of clients, other
prompts and other answers; the simulation predicts it from the fit alone.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh
from benchmarks.random_model import make_random_model
from benchmarks.simulate.device_time import Fitted, StepWork
from benchmarks.simulate.report import summarize
from benchmarks.simulate.traces import Conversation, Turn
from benchmarks.simulate.world import World
from protos.glm.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler.limits import CoreConfig
from services.scheduler.plan import Capacity

ROOT: Final = Path(__file__).resolve().parents[2]
MAX_SEQS: Final = 64
MAX_TOKENS: Final = 2048
# Clients, requests and words of a prompt, in the phases of the first run; long prompts are among
# them since a token of one costs more. Clients and requests of the second run.
PHASES: Final = (
    *((1, 8, 60), (1, 4, 300), (4, 16, 60), (16, 48, 60)),
    *((16, 48, 400), (2, 12, 600), (48, 144, 60), (48, 96, 150)),
)
FIRST_TOKENS: Final = 48
SECOND: Final = (32, 96)
SECOND_WORDS: Final = 240
SECOND_TOKENS: Final = 64
# Sums over fewer steps, or seconds, than these say more of their edges than of the steps.
MIN_STEPS: Final = 8
MIN_SUM_S: Final = 0.6
# After a phase: its last look is there by then.
PAUSE_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Look:
    """The scheduler's counters at a moment."""

    at: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_total_blocks: int


@dataclass(frozen=True, slots=True)
class Phase:
    """Looks at clients that all ask alike."""

    looks: list[Look]
    num_requests: int

    @property
    def num_prompt(self) -> float:
        """Tokens of a prompt."""
        looks = self.looks
        return (looks[-1].num_prompt_tokens - looks[0].num_prompt_tokens) / self.num_requests

    @property
    def num_output(self) -> float:
        """Tokens of an answer."""
        looks = self.looks
        return (looks[-1].num_output_tokens - looks[0].num_output_tokens) / self.num_requests


class Measured(NamedTuple):
    """One phase, from both ends."""

    phase: Phase
    answer: dict[str, Any]


class Watcher:
    """Follows the scheduler's load in a thread of its own."""

    def __init__(self, address: str) -> None:
        """Start to follow."""
        self.looks: list[Look] = []
        self._channel = grpc.insecure_channel(address)
        self._call = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).WatchLoad(
            scheduler_pb2.WatchLoadRequest()
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def phase(self, num_requests: int, ask: Callable[[], dict[str, Any]]) -> Measured:
        """What is seen while clients ask, and what they see."""
        first = len(self.looks) - 1
        answer = ask()
        time.sleep(PAUSE_S)
        return Measured(Phase(self.looks[first:], num_requests), answer)

    def stop(self) -> None:
        """Follow no longer."""
        self._call.cancel()
        self._thread.join(5)
        self._channel.close()

    def _follow(self) -> None:
        try:
            for message in self._call:
                load = message.load
                self.looks.append(
                    Look(
                        time.perf_counter(),
                        load.num_steps_total,
                        load.num_prompt_tokens_total,
                        load.num_output_tokens_total,
                        load.num_total_blocks,
                    )
                )
        except grpc.RpcError:
            return


def calibrate() -> dict[str, object]:
    """Measure, fit, measure again, predict, compare."""
    model = make_random_model(ROOT / ".bench" / "model", ROOT / "models" / "glm-nano")
    flags = ["--model", str(model), "--served-model-name", "tiny"]
    flags += ["--max-num-seqs", str(MAX_SEQS), "--max-num-batched-tokens", str(MAX_TOKENS)]
    flags += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(1 << 30)]
    # Two threads that share cores with the other services make steps as long as those are busy.
    flags += ["--num-threads", "1"]
    with (
        tempfile.TemporaryDirectory(prefix="cal") as run_dir,
        running_mesh(*flags, "--run-dir", run_dir) as mesh,
    ):
        _load(mesh.port, (8, 16), 60, 16, seed=0)  # warm
        watcher = Watcher(f"unix:{run_dir}/scheduler.sock")
        time.sleep(PAUSE_S)
        first = [
            watcher.phase(
                num_requests,
                partial(_load, mesh.port, (num, num_requests), words, FIRST_TOKENS, seed),
            )
            for seed, (num, num_requests, words) in enumerate(PHASES, start=1)
        ]
        second = watcher.phase(
            SECOND[1], partial(_load, mesh.port, SECOND, SECOND_WORDS, SECOND_TOKENS, seed=100)
        )
        watcher.stop()
    device = fit([measured.phase for measured in first])
    prompt, alone = first[0].phase.num_prompt, first[0].answer
    work = StepWork(
        num_rows=1,
        num_tokens=round(prompt),
        num_context_tokens=round(prompt**2 / 2),
        num_prompt_tokens=round(prompt),
        num_prompt_context_tokens=round(prompt**2 / 2),
    )
    front_s = max(0.0, alone["ttft_ms_p50"] / 1000 - device.seconds(work))
    predicted = predict(device, round(second.phase.num_prompt), front_s)
    return _compared(device, front_s, second.answer, predicted)


def fit(phases: list[Phase]) -> Fitted:
    """The device whose steps take what the looks tell: each sum counts by its relative error."""
    rows, seconds = [], []
    for phase in phases:
        for before, after in _sums(phase.looks):
            num_output = after.num_output_tokens - before.num_output_tokens
            num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
            context = num_prompt * phase.num_prompt / 2
            row_context = num_output * (phase.num_prompt + phase.num_output / 2)
            num_steps = after.num_steps - before.num_steps
            rows.append((num_steps, num_output, num_prompt, context, row_context))
            seconds.append(after.at - before.at)
    measured = np.array(seconds)
    known = np.array(rows, dtype=float) / measured[:, None]
    found = _least_squares(known, np.ones(len(measured)))
    capacity = Capacity(
        num_blocks=phases[-1].looks[-1].num_total_blocks + 1,
        block_size_tokens=128,
        num_rows=2 * MAX_SEQS,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=4096,
    )
    return Fitted(
        capacity=capacity,
        per_step_s=found[0],
        per_row_s=found[1],
        per_prompt_token_s=found[2],
        per_context_token_s=found[3],
        per_row_context_token_s=found[4],
    )


def _sums(looks: list[Look]) -> Iterator[tuple[Look, Look]]:
    """Looks that lie enough steps apart; the first and the last, amid idle time, tell nothing."""
    inner = looks[1:-1]
    before: Look | None = None
    for last, look in itertools.pairwise(inner):
        if look.num_steps == last.num_steps:
            before = None
        elif before is None:
            before = look
        elif look.num_steps - before.num_steps >= MIN_STEPS and look.at - before.at >= MIN_SUM_S:
            yield before, look
            before = look


def predict(device: Fitted, num_prompt: int, front_s: float) -> dict[str, Any]:
    """The second run, simulated: clients that ask again as soon as they have their answer."""
    num_clients, num_requests = SECOND
    turn = Turn(num_new_tokens=num_prompt, num_output_tokens=SECOND_TOKENS, pause_s=front_s)
    clients = [
        Conversation(arrives_at=front_s, turns=[turn] * (num_requests // num_clients), forgets=True)
        for _ in range(num_clients)
    ]
    # The fit has the scheduler's time and the way of messages in it.
    world = World(CoreConfig(), device, cost_factor=0.0, message_s=0.0)
    outcome = world.run(clients)
    line = summarize(outcome, outcome.ended_at, 1)
    ttft = [
        s.first_token_at - s.arrived_at + front_s
        for s in outcome.served
        if s.first_token_at is not None
    ]
    return line | {"ttft_ms_p50": 1000 * float(np.median(ttft))}


def _load(
    port: int, clients: tuple[int, int], words: int, num_tokens: int, seed: int
) -> dict[str, Any]:
    concurrency, num_requests = clients
    return run_load(
        LoadSpec(
            port=port,
            model="tiny",
            concurrency=concurrency,
            num_requests=num_requests,
            prompt_words=words,
            max_tokens=num_tokens,
            seed=seed,
        )
    )


def _least_squares(rows: "np.ndarray[Any, Any]", seconds: "np.ndarray[Any, Any]") -> list[float]:
    """Coefficients that are not negative: those that would be are left out."""
    kept = list(range(rows.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(rows[:, kept], seconds, rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(found.argmin())]
    result = [0.0] * rows.shape[1]
    for place, value in zip(kept, found, strict=True):
        result[place] = max(0.0, float(value))
    return result


def _compared(
    device: Fitted, front_s: float, measured: dict[str, Any], predicted: dict[str, Any]
) -> dict[str, object]:
    rate, known = predicted["output_tokens_per_s"], measured["tokens_per_s"]
    ttft, known_ttft = predicted["ttft_ms_p50"], measured["ttft_ms_p50"]
    return {
        "claim": "simulate_calibrated",
        "per_step_ms": round(device.per_step_s * 1e3, 3),
        "per_row_us": round(device.per_row_s * 1e6, 1),
        "per_prompt_token_us": round(device.per_prompt_token_s * 1e6, 1),
        "per_context_token_us": round(device.per_context_token_s * 1e6, 3),
        "per_row_context_token_us": round(device.per_row_context_token_s * 1e6, 3),
        "front_ms": round(front_s * 1e3, 2),
        "measured_tokens_per_s": known,
        "predicted_tokens_per_s": rate,
        "error_tokens_per_s": round(rate / known - 1, 3),
        "measured_ttft_ms_p50": known_ttft,
        "predicted_ttft_ms_p50": round(ttft, 1),
        "error_ttft": round(ttft / known_ttft - 1, 3),
        "target": 0.15,
        "errors": measured["errors"],
    }
