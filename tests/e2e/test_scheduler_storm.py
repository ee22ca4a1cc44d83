"""A long run: schedulers are killed, frozen and stopped under load, and nobody notices."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay, running

NAMES = ("scheduler", "scheduler-1", "scheduler-2")
NUM_READERS = 16
STORM_S = 150.0
# The launcher starts a service again three times in a minute: each is lost once in 21 seconds.
PAUSE_S = 7.0
SILENCE_S = 1.5
FROZEN_S = 4.0


@pytest.fixture(scope="module")
def three() -> Iterator[Mesh]:
    yield from running(
        *("--worker", "replay", "--scheduler-count", "3", "--detokenizer-count", "2"),
        environment={
            "GLM_MESH_DETOKENIZER_SILENCE_TIMEOUT_S": str(SILENCE_S),
            "GLM_MESH_DETOKENIZER_MAX_RESUMPTIONS": "20",
        },
    )


class Reader(threading.Thread):
    """Asks for one text after the other, as long as the storm lasts."""

    def __init__(self, mesh: Mesh, number: int, until: float) -> None:
        super().__init__()
        self.url, self.until = f"{mesh.url}/v1/completions", until
        self.rng = random.Random(number)
        self.num_whole = 0
        self.wrong: list[Any] = []

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while time.monotonic() < self.until:
                self._ask(client)

    def _ask(self, client: httpx.Client) -> None:
        text = " ".join(str(self.rng.randrange(1000)) for _ in range(self.rng.randint(200, 1800)))
        is_stream = self.rng.random() < 0.7
        # Runs of tokens: a client in Python would be the slowest reader of all otherwise.
        script = replay(text, (4, 9, 6))
        body = {"model": "glm-nano", "prompt": text[:40], "max_tokens": 8000, **script}
        answer = client.post(self.url, json={**body, "stream": is_stream})
        if answer.status_code == 503:  # there was no scheduler at all when it came
            time.sleep(0.1)
        elif answer.status_code != 200 or text_of(answer, is_stream=is_stream) != text:
            self.wrong.append((answer.status_code, answer.text[-400:]))
        else:
            self.num_whole += 1


def text_of(answer: httpx.Response, *, is_stream: bool) -> str:
    if not is_stream:
        return str(answer.json()["choices"][0]["text"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line).get("choices", ())]
    return "".join(choice["text"] for choice in choices)


def storm(mesh: Mesh, until: float, rng: random.Random) -> int:
    """Lose one scheduler after the other; how many that were."""
    number = 0
    while time.monotonic() < until:
        name = NAMES[number % len(NAMES)]
        kind = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
        pid = mesh.pid(name)
        os.kill(pid, kind)
        number += 1
        if kind == signal.SIGSTOP:
            time.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)
        time.sleep(PAUSE_S - FROZEN_S * (kind == signal.SIGSTOP))
    return number


@pytest.mark.soak
def test_whatever_is_lost_and_how_often_every_answer_is_whole(three: Mesh) -> None:
    until = time.monotonic() + STORM_S
    readers = [Reader(three, number, until) for number in range(NUM_READERS)]
    for reader in readers:
        reader.start()
    num_lost = storm(three, until, random.Random(7))
    for reader in readers:
        reader.join(60)
    assert not any(reader.is_alive() for reader in readers)
    wrong = [entry for reader in readers for entry in reader.wrong]
    assert not wrong, wrong[:3]
    assert sum(reader.num_whole for reader in readers) > 10 * num_lost
    three.until(lambda: three.metric("glm_mesh:num_schedulers_reached") == 3, 30, "all are there")
    three.until(lambda: three.metric("glm_mesh:replica_is_ready") == 3, 30, "with their workers")
    three.until_idle()
    assert three.metric("glm_mesh:unresumed_sequences_total") == 0
    assert three.metric("glm_mesh:sequence_resubmissions_total") > num_lost
