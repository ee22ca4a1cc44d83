"""Scores a running server on fresh prompts of every skill, through the OpenAI API.

    python -m tools.nano.evaluate --base-url http://127.0.0.1:8000/v1 --prompts 300

Prints one JSON line per skill and a summary. Decoding is greedy and the prompts are the same for
everyone who asks for the same number; none of their words was seen in training.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tools.nano.tasks import SKILLS, Task, make_task

REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one request went; ``error`` is empty unless it got no answer."""

    skill: str
    seed: int = 0
    is_right: bool
    completion_tokens: int = 0
    error: str = ""


def request_body(task: Task, model: str) -> dict[str, Any]:
    """Returns the chat request of a task."""
    body: dict[str, Any] = {
        "model": model,
        "messages": wire_messages(task.messages),
        "temperature": 0,
        "max_tokens": task.max_tokens,
    }
    if task.tools:
        body["tools"] = task.tools
    if task.chat_template_kwargs:
        body["chat_template_kwargs"] = task.chat_template_kwargs
    return body


def wire_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Writes arguments as JSON text and names in each result the call that it answers."""
    result: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        calls = [
            call
            | {
                "function": call["function"]
                | {"arguments": json.dumps(call["function"]["arguments"])}
            }
            for call in message.get("tool_calls", [])
        ]
        if calls:
            waiting = [call["id"] for call in calls]
            result.append(message | {"tool_calls": calls})
        elif message["role"] == "tool":
            result.append(message | {"tool_call_id": waiting.pop(0)})
        else:
            result.append(message)
    return result


def judge(task: Task, message: dict[str, Any]) -> bool:
    """Says whether an assistant message solves the task."""
    calls = []
    for call in message.get("tool_calls") or []:
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except json.JSONDecodeError:
            return False
        calls.append({"name": call["function"]["name"], "arguments": arguments})
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return task.check(message.get("content") or "", reasoning, calls)


async def ask(
    client: httpx.AsyncClient, gate: asyncio.Semaphore, task: Task, model: str
) -> Verdict:
    """Sends one task and judges the answer."""
    async with gate:
        try:
            response = await client.post("chat/completions", json=request_body(task, model))
        except httpx.HTTPError as error:
            return Verdict(
                skill=task.skill, is_right=False, error=f"{type(error).__name__}: {error}"
            )
    if response.status_code != httpx.codes.OK:
        return Verdict(skill=task.skill, is_right=False, error=response.text[:200])
    answer = response.json()
    tokens = (answer.get("usage") or {}).get("completion_tokens", 0)
    right = judge(task, answer["choices"][0]["message"])
    return Verdict(skill=task.skill, is_right=right, completion_tokens=tokens)


def summary(verdicts: list[Verdict], seconds: float) -> dict[str, Any]:
    """Returns the summary line."""
    errors = [verdict.error for verdict in verdicts if verdict.error]
    return {
        "prompts": len(verdicts),
        "correct": sum(verdict.is_right for verdict in verdicts),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "completion_tokens": sum(verdict.completion_tokens for verdict in verdicts),
        "seconds": round(seconds, 1),
    }


def write_verdicts(path: Path, verdicts: list[Verdict]) -> None:
    """Writes one JSON line per prompt, for comparisons prompt by prompt."""
    path.write_text("".join(f"{json.dumps(asdict(verdict))}\n" for verdict in verdicts))


async def evaluate(options: argparse.Namespace) -> int:
    """Runs the evaluation; returns the exit status, 1 if any request got no answer."""
    gate, everything = asyncio.Semaphore(options.concurrency), []
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    began = time.monotonic()
    base_url = options.base_url.rstrip("/") + "/"
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=REQUEST_TIMEOUT_S
    ) as client:
        model = options.model or (await client.get("models")).json()["data"][0]["id"]
        for skill in options.skills:
            tasks = [make_task(skill, seed) for seed in range(options.prompts)]
            answers = await asyncio.gather(*(ask(client, gate, task, model) for task in tasks))
            verdicts = [replace(verdict, seed=seed) for seed, verdict in enumerate(answers)]
            correct = sum(verdict.is_right for verdict in verdicts)
            line = {"skill": skill, "prompts": len(verdicts), "correct": correct}
            print(json.dumps(line | {"score": round(correct / len(verdicts), 4)}), flush=True)
            everything += verdicts
    if options.verdicts:
        write_verdicts(options.verdicts, everything)
    total = summary(everything, time.monotonic() - began)
    print(json.dumps({"summary": total}), flush=True)
    return int(total["errors"] > 0)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompts", type=int, default=300, help="prompts per skill")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--model", default="", help="default: the first the server lists")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--skills", nargs="+", default=list(SKILLS), choices=SKILLS)
    parser.add_argument("--verdicts", type=Path, help="file for one JSON line per prompt")
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point."""
    sys.exit(asyncio.run(evaluate(parse(sys.argv[1:]))))


if __name__ == "__main__":
    main()
