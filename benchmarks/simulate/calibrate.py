"""One measured run of the CPU mesh gives the device model; a second run, unlike it, tests it.

The first run has clients of several numbers with short prompts. Ten times per second the scheduler
tells how many steps, prompt tokens and output tokens there were: the seconds between two looks are
fitted as a sum of the three. What the mesh takes of a request outside of steps is the first run's
time to the first token with one client, less the step. The second run has another number of
clients, longer prompts and other answers; the simulation predicts it from the fit alone.
"""

import dataclasses
import itertools
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.load import LoadSpec, run_load
from benchmarks.mesh import running_mesh
from benchmarks.random_model import make_random_model
from benchmarks.simulate.device_time import Fitted
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
PHASES: Final = ((1, 4, 60), (4, 16, 60), (16, 32, 400), (16, 48, 60), (48, 96, 150))
FIRST_TOKENS: Final = 48
SECOND: Final = (32, 96)
SECOND_WORDS: Final = 240
SECOND_TOKENS: Final = 64
# Sums over fewer steps than this say more of their edges than of the steps.
MIN_STEPS: Final = 5
# Between two phases.
PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """The scheduler's counters at a moment."""

    at: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_total_blocks: int


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

    def pause(self) -> None:
        """Leave a gap between two phases that the looks show."""
        time.sleep(0.3)
        last = self.looks[-1]
        self.looks.append(dataclasses.replace(last, at=last.at + 2 * PAUSE_S))

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
        _load(mesh.port, (8, 16), 60, 16)  # warm
        watcher = Watcher(f"unix:{run_dir}/scheduler.sock")
        alone = _load(mesh.port, PHASES[0][:2], PHASES[0][2], FIRST_TOKENS)
        time.sleep(0.3)
        num_alone = watcher.looks[-1].num_prompt_tokens - watcher.looks[0].num_prompt_tokens
        for *clients, words in PHASES[1:]:
            watcher.pause()
            _load(mesh.port, (clients[0], clients[1]), words, FIRST_TOKENS)
        watcher.pause()
        first = list(watcher.looks)
        measured = _load(mesh.port, SECOND, SECOND_WORDS, SECOND_TOKENS)
        time.sleep(0.3)
        second = watcher.looks[len(first) :]
        watcher.stop()
    device = fit(first)
    prompt = num_alone / PHASES[0][1]
    step_s = device.per_step_s + device.per_row_s + device.per_prompt_token_s * prompt
    front_s = max(0.0, alone["ttft_ms_p50"] / 1000 - step_s)
    num_prompt = (second[-1].num_prompt_tokens - first[-1].num_prompt_tokens) / SECOND[1]
    predicted = predict(device, round(num_prompt), front_s)
    return _compared(device, front_s, measured, predicted)


def fit(looks: list[Look]) -> Fitted:
    """The device whose steps take what the looks tell.

    Looks are taken together until they have enough steps, also where a step takes seconds; one
    with nothing to tell is the pause between two phases, where the sums start again.
    """
    rows, seconds = [], []
    before = looks[0]
    for last, after in itertools.pairwise(looks):
        if after.num_steps == last.num_steps and after.at - last.at > PAUSE_S:
            before = after
            continue
        num_steps = after.num_steps - before.num_steps
        if num_steps >= MIN_STEPS:
            rows.append(
                (
                    num_steps,
                    after.num_output_tokens - before.num_output_tokens,
                    after.num_prompt_tokens - before.num_prompt_tokens,
                )
            )
            seconds.append(after.at - before.at)
            before = after
    found = _least_squares(np.array(rows, dtype=float), np.array(seconds))
    capacity = Capacity(
        num_blocks=looks[-1].num_total_blocks + 1,
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
    )


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


def _load(port: int, clients: tuple[int, int], words: int, num_tokens: int) -> dict[str, Any]:
    concurrency, num_requests = clients
    return run_load(
        LoadSpec(
            port=port,
            model="tiny",
            concurrency=concurrency,
            num_requests=num_requests,
            prompt_words=words,
            max_tokens=num_tokens,
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
