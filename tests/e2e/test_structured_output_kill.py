"""A constrained answer goes on in its grammar after its worker was killed and came back."""

import json
import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.mesh import Mesh, running

# The rest of it takes seconds when the first tokens are here.
LENGTH = 1000
PATTERN = f"[a-z ]{{{LENGTH}}}"
BODY = {
    "model": "glm-nano",
    "prompt": "Repeat:",
    "max_tokens": 1500,
    "temperature": 1,
    "seed": 4,
    "stream": True,
    "structured_outputs": {"regex": PATTERN},
}


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """Whose sequences wait long enough for their worker."""
    yield from running(
        *("--dtype", "float32", "--num-threads", "1"),
        environment={"GLM_MESH_SCHEDULER_WORKER_GRACE_S": "60"},
    )


def test_a_resumed_answer_goes_on_in_its_grammar(mesh: Mesh) -> None:
    pieces: list[str] = []
    reason = None
    with (
        httpx.Client(timeout=120) as client,
        client.stream("POST", f"{mesh.url}/v1/completions", json=BODY) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                pieces.append(choice["text"])
                reason = choice["finish_reason"] or reason
            if len(pieces) == 30:
                os.kill(mesh.pid("worker"), signal.SIGKILL)
    assert reason == "stop"
    assert re.fullmatch(PATTERN, "".join(pieces))
    assert "worker lost" in mesh.log("scheduler")
