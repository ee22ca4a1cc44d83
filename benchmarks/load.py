"""Streaming load on an OpenAI-compatible server: plain sockets, so that the client costs little."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

_WORDS = [
    *("alpha", "beta", "gamma", "delta", "red", "blue"),
    *("seven", "nine", "river", "stone", "cloud"),
]


# Seed of the prompts that no figure comes from.
WARM_UP_SEED = 999_983


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """What to send: `extra` goes into every body (a replay script, say).

    Loads of different seeds share no prompt, so that none finds another's in a prefix cache.
    """

    port: int
    model: str
    concurrency: int
    num_requests: int
    prompt_words: int = 60
    max_tokens: int = 128
    seed: int = 7
    extra: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Answer:
    status: int = 0
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    failure: str = ""


def run_load(spec: LoadSpec) -> dict[str, Any]:
    """Send the load, wait for all answers; rates in tokens per second, times in milliseconds."""
    return asyncio.run(_run(spec))


async def _run(spec: LoadSpec) -> dict[str, Any]:
    rng = random.Random(spec.seed)
    prompts = [
        f"{spec.seed} {i} " + " ".join(rng.choice(_WORDS) for _ in range(spec.prompt_words))
        for i in range(spec.num_requests)
    ]
    gate = asyncio.Semaphore(spec.concurrency)

    async def one(prompt: str) -> _Answer:
        async with gate:
            return await _request(spec, prompt)

    started = time.perf_counter()
    answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    wall = time.perf_counter() - started
    good = [a for a in answers if a.status == 200 and a.num_tokens]
    tokens = sum(a.num_tokens for a in good)
    ttft = sorted(a.ttft_s for a in good)
    gaps = sorted(gap for a in good for gap in a.gaps_s)
    return {
        "concurrency": spec.concurrency,
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "error_statuses": sorted({a.status for a in answers if not a.num_tokens}),
        "first_error": next((a.failure for a in answers if a.failure), ""),
        "tokens": tokens,
        "frames": sum(1 + len(a.gaps_s) for a in good),
        "tokens_per_s": round(tokens / wall, 1),
        "ttft_ms_p50": _percentile_ms(ttft, 0.5),
        "ttft_ms_p99": _percentile_ms(ttft, 0.99),
        "gap_ms_p50": _percentile_ms(gaps, 0.5),
        "gap_ms_p99": _percentile_ms(gaps, 0.99),
        "wall_s": round(wall, 2),
    }


async def _request(spec: LoadSpec, prompt: str) -> _Answer:
    body = {
        "model": spec.model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": spec.max_tokens,
        "ignore_eos": True,
    } | spec.extra
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    ).encode()
    answer, started = _Answer(), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", spec.port, limit=2**20)
    try:
        writer.write(head + data)
        await _read_answer(reader, answer, started)
    except OSError as error:
        answer.failure = repr(error)
    finally:
        writer.close()
    return answer


async def _read_answer(reader: asyncio.StreamReader, answer: _Answer, started: float) -> None:
    last = started
    async for line in reader:
        if not answer.status:
            answer.status = int(line.split()[1])
        if b'"error":' in line:
            answer.failure = line.decode(errors="replace")[:300]
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if b'"usage":{' in line or b'"usage": {' in line:
            answer.num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
        if answer.ttft_s:
            answer.gaps_s.append(now - last)
        else:
            answer.ttft_s = now - started
        last = now


def _percentile_ms(values: list[float], share: float) -> float:
    if not values:
        return 0.0
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 2)
