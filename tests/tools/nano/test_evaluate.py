"""The evaluation client: sends what the API wants, judges what it gets, reports what failed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.nano import evaluate
from tools.nano.tasks import make_task


def _answering(status: int, message: dict[str, Any]) -> httpx.AsyncClient:
    body = {"choices": [{"message": message}], "usage": {"completion_tokens": 5}}
    transport = httpx.MockTransport(lambda _: httpx.Response(status, json=body))
    return httpx.AsyncClient(base_url="http://test/v1/", transport=transport)


def _ask(client: httpx.AsyncClient, task: Any) -> evaluate.Verdict:
    async def run() -> evaluate.Verdict:
        async with client:
            return await evaluate.ask(client, asyncio.Semaphore(1), task, "m")

    return asyncio.run(run())


def test_request_is_greedy_and_writes_arguments_as_text() -> None:
    task = make_task("tool_result", 1)
    body = evaluate.request_body(task, "m")
    assert body["temperature"] == 0
    call = next(m for m in body["messages"] if m.get("tool_calls"))["tool_calls"][0]
    assert isinstance(call["function"]["arguments"], str)
    assert body["tools"] == task.tools


@pytest.mark.parametrize("skill", ["echo", "tool_call"])
def test_right_answer_counts(skill: str) -> None:
    task = make_task(skill, 2)
    (message,) = evaluate.wire_messages([task.answer])
    verdict = _ask(_answering(200, message | {"content": message["content"] or None}), task)
    assert verdict.is_right
    assert verdict.completion_tokens == 5


def test_broken_arguments_are_wrong_and_not_an_error() -> None:
    task = make_task("tool_call", 2)
    call = {"function": {"name": "x", "arguments": "{"}}
    verdict = _ask(_answering(200, {"tool_calls": [call]}), task)
    assert not verdict.is_right
    assert not verdict.error


def test_refused_request_is_an_error_in_the_summary() -> None:
    verdict = _ask(_answering(503, {}), make_task("echo", 0))
    assert evaluate.summary([verdict], 1.0)["errors"] == 1


def test_unreachable_server_is_an_error_not_a_crash() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    client = httpx.AsyncClient(base_url="http://t/v1/", transport=httpx.MockTransport(refuse))
    assert "refused" in _ask(client, make_task("echo", 0)).error


def test_scores_are_one_json_line_per_skill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"content": make_task("echo", 0).answer["content"]}
    client = _answering(200, message)
    monkeypatch.setattr(evaluate.httpx, "AsyncClient", lambda **_: client)
    file = tmp_path / "verdicts"
    words = ["--model", "m", "--prompts", "2", "--skills", "echo", "--verdicts", str(file)]
    options = evaluate.parse(words)
    assert asyncio.run(evaluate.evaluate(options)) == 0
    verdicts = [json.loads(line) for line in file.read_text().splitlines()]
    assert [verdict["seed"] for verdict in verdicts] == [0, 1]
    assert sum(verdict["is_right"] for verdict in verdicts) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {"skill": "echo", "prompts": 2, "correct": 1, "score": 0.5}
    assert lines[1]["summary"]["correct"] == 1


def test_every_call_of_a_conversation_is_answered_by_its_own_result() -> None:
    for seed in range(40):
        messages = evaluate.wire_messages(make_task("tool_result", seed).messages)
        called = [call["id"] for m in messages for call in m.get("tool_calls", ())]
        answered = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert answered == called
