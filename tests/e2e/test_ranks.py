"""A worker of two ranks: its processes, and the text of one rank."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import Mesh, is_alive

FLAGS = ("--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "8")
PROMPTS = ("What is 17 + 25?", "Repeat after me: žluťoučký kůň, 馬, 🐎", "Say hello")


def ask(mesh: Mesh, content: str) -> dict[str, Any]:
    body = {
        "model": "glm-nano",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 60,
    }
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def worth(mesh: Mesh, prompt: str) -> list[float | None]:
    """Log-probabilities of a prompt's tokens."""
    body = {"model": "glm-nano", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
    answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120)
    found: list[float | None] = answer.json()["choices"][0]["logprobs"]["token_logprobs"][:-1]
    return found


def answers(mesh: Mesh, prompts: Sequence[str] = PROMPTS) -> list[tuple[str, str]]:
    found = [ask(mesh, prompt) for prompt in prompts]
    return [(one.get("reasoning") or "", one.get("content") or "") for one in found]


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Mesh]:
    """Cut over two ranks."""
    mesh = Mesh(*FLAGS, "--tensor-parallel-size", "2")
    pids = [mesh.pid(name) for name in ("worker", "worker.1")]
    try:
        yield mesh
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "s, killed" not in mesh.screen
    assert not any(is_alive(pid) for pid in pids), "a rank outlived its mesh"


# Far beyond the 128 positions that a token attends to, and more than one step of those below.
LONG = "\n".join(
    (*(f"key{at}: {at * 37 % 101}" for at in range(60)), "What is the value of key41?")
)


def test_ranks_that_cut_tokens_say_the_same_of_long_prompts_with_drafts(nano: Mesh) -> None:
    """Of 64 tokens a step, so that chunks of one prompt meet decodes of others."""
    cuts = {"enable_dsa_cp": True, "enable_flashcomm1": True}
    drafts = {"method": "deepseek_mtp", "num_speculative_tokens": 2}
    prompts = (*PROMPTS, LONG)
    mesh = Mesh(
        *(*FLAGS, "-tp", "2", "--max-num-batched-tokens", "64"),
        *("--additional-config", json.dumps(cuts), "--speculative-config", json.dumps(drafts)),
    )
    try:
        with ThreadPoolExecutor(len(prompts)) as threads:
            together = list(threads.map(lambda prompt: answers(mesh, [prompt])[0], prompts))
        assert together == answers(nano, prompts)
        assert "steps are not captured" not in mesh.log("worker")
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen
    assert "no effect" not in mesh.screen


def test_two_ranks_measure_a_prompt_as_one_does(two_ranks: Mesh, nano: Mesh) -> None:
    prompt = PROMPTS[1] * 20  # several tiles of the head
    measured, alone = worth(two_ranks, prompt), worth(nano, prompt)
    assert measured[0] is alone[0] is None
    # float32, added up over two ranks.
    assert measured[1:] == pytest.approx(alone[1:], abs=1e-3)


def test_two_ranks_say_what_one_says(two_ranks: Mesh, nano: Mesh) -> None:
    assert answers(two_ranks) == answers(nano)
    services = json.loads((two_ranks.run_dir / "mesh.json").read_text())["services"]
    assert set(services["worker.1"]) == {"pid", "log"}
    assert Path(services["worker.1"]["log"]).exists()
