"""A set of requests, their answers token by token, and a judge of two sets of answers.

Ways of starting a mesh add up the same numbers in other orders, so logits differ by rounding. A
greedy token may be another only where that can have turned two logits around; what follows is then
another text and is not compared.
"""

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.e2e.layouts import NUM_SEQS
from tests.e2e.mesh import Mesh
from tools.nano.tasks import SKILLS, make_task
from tools.nano.template import ChatTemplate

NANO: Final = Path(__file__).parents[2] / "models" / "glm-nano"
# Prompts of several hundred tokens take several steps, which other sequences share.
STEP_TOKENS: Final = 160
LIMITS: Final = (
    *("--dtype", "float32", "--num-threads", "1"),
    *("--max-num-seqs", str(NUM_SEQS), "--max-num-batched-tokens", str(STEP_TOKENS)),
)
# Logits of glm-nano are below 32 in size, where float32 has a last bit of 2e-6. Five layers with
# some six sums each, of up to 500 products, are added up in another order: a few last bits each,
# which add up as random steps do. That is some 2e-5; the most that was seen in any way is 1.4e-5.
ROUNDING: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Request:
    """One request to `/v1/completions`."""

    name: str
    body: dict[str, Any]
    is_greedy: bool = True
    """Each token is the one with the largest logit that is reported."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, token by token."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    margins: Sequence[float]
    """Between the two most likely tokens, at each place."""
    finish_reason: str


@dataclass(slots=True)
class Verdict:
    """What a comparison found."""

    num_compared: int = 0
    near_ties: list[str] = field(default_factory=list)
    """Where two logits were so close that either token is right."""
    largest_error: float = 0.0
    """Of a token's logprob."""


def requests() -> list[Request]:
    """Sent at once: short and long prompts, greedy and sampled ones, with penalties."""
    template = ChatTemplate(NANO)
    found = []
    for skill in SKILLS:
        task = make_task(skill, 11)
        text = template.render(task.messages, task.tools or None)
        found.append(Request(skill, {"prompt": text, "max_tokens": 60}))
    # Beyond what the model knows its logits lie close to each other: small errors would show.
    rng = random.Random(5)
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    crowd = " ".join(rng.choice(words) for _ in range(220))
    endless = {"prompt": "one two three", "max_tokens": 72, "ignore_eos": True}
    chance = {"temperature": 1.0, "top_p": 0.95}
    found += [
        Request("babble", endless),
        Request("babble behind a long prompt", endless | {"prompt": crowd, "max_tokens": 40}),
        Request("sampled", endless | chance | {"seed": 7}, is_greedy=False),
        Request("two choices", endless | chance | {"seed": 8, "n": 2}, is_greedy=False),
        Request(
            "penalties",
            endless | {"frequency_penalty": 0.4, "repetition_penalty": 1.1},
            is_greedy=False,
        ),
        Request(
            "everything",
            endless | chance | {"prompt": crowd, "seed": 9, "presence_penalty": 0.5, "min_p": 0.02},
            is_greedy=False,
        ),
        Request(
            "a grammar",
            {
                "prompt": "one two",
                "max_tokens": 60,
                "structured_outputs": {"regex": "[a-z]{3,9}( [a-z]{2,9}){9}\\."},
                **chance,
                "seed": 10,
            },
            is_greedy=False,
        ),
        Request("words that are not", endless | {"bad_words": ["three three"]}, is_greedy=False),
    ]
    return found


def answers(mesh: Mesh, asked: Sequence[Request]) -> dict[str, list[Answer]]:
    """Ask everything at once; the choices of each request."""
    with httpx.Client(timeout=300) as client, ThreadPoolExecutor(len(asked)) as pool:
        found = pool.map(lambda request: _ask(client, mesh, request), asked)
        return {request.name: choices for request, choices in zip(asked, found, strict=True)}


def _ask(client: httpx.Client, mesh: Mesh, request: Request) -> list[Answer]:
    body = {
        "model": "glm-nano",
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        **request.body,
    }
    answer = client.post(f"{mesh.url}/v1/completions", json=body)
    assert answer.status_code == 200, f"{request.name}: {answer.text}"
    return [_read(choice) for choice in answer.json()["choices"]]


def _read(choice: dict[str, Any]) -> Answer:
    logprobs = choice["logprobs"]
    tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
    return Answer(
        token_ids=choice["token_ids"],
        logprobs=logprobs["token_logprobs"],
        # Two tokens with the same spelling are one entry: then nothing is known to be close.
        margins=[top[0] - top[1] if len(top) > 1 else float("inf") for top in tops],
        finish_reason=choice["finish_reason"],
    )


def compare(
    asked: Iterable[Request], plain: dict[str, list[Answer]], other: dict[str, list[Answer]]
) -> Verdict:
    """Hold answers against those of the plain way.

    Raises:
        AssertionError: A token, a logprob or an end is another one for no good reason.
    """
    verdict = Verdict()
    for request in asked:
        pairs = zip(plain[request.name], other[request.name], strict=True)
        for ours, theirs in pairs:
            _compare_choice(request, ours, theirs, verdict)
    return verdict


def _compare_choice(request: Request, ours: Answer, theirs: Answer, verdict: Verdict) -> None:
    for place, (one, another) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)):
        where = f"{request.name}, token {place}"
        if one != another:
            margin = max(ours.margins[place], theirs.margins[place])
            is_near = request.is_greedy and margin <= 2 * ROUNDING
            assert is_near, f"{where}: {one} and {another}, {margin:.5f} between the two best"
            verdict.near_ties.append(f"{where}: {margin:.5f} between the two best")
            return
        error = abs(ours.logprobs[place] - theirs.logprobs[place])
        assert error <= ROUNDING, f"{where}: its logprobs differ by {error}"
        verdict.largest_error = max(verdict.largest_error, error)
        verdict.num_compared += 1
    assert len(ours.token_ids) == len(theirs.token_ids), f"{request.name}: one is longer"
    assert ours.finish_reason == theirs.finish_reason, request.name
