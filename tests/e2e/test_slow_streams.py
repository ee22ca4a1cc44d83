"""Streams that take long: kept alive while they are silent, ended when their time is over."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.asks import CHAT, MESSAGES, RESPONSES, Ask, said
from tests.e2e.mesh import Mesh, replay, running
from tests.e2e.visitors import Place, parse, request

TIMEOUT_S = 6
LONG = "word " * 7000


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    """With little patience."""
    yield from running(
        *("--worker", "replay"),
        environment={
            "GLM_MESH_FRONTEND_SSE_KEEP_ALIVE_INTERVAL": "0.2",
            "GLM_MESH_FRONTEND_REQUEST_TIMEOUT_S": str(TIMEOUT_S),
        },
    )


def fields(path: str, text: str) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": "x", "max_output_tokens": 7500, **replay(text)}
    messages = [{"role": "user", "content": "x"}]
    return {"messages": messages, "max_tokens": 7500, **replay(text)}


def long(path: str, *, is_stream: bool) -> bytes:
    return request(path, Ask("long", path, fields(path, LONG)).body(is_stream=is_stream))


@pytest.mark.parametrize(
    ("path", "sign"),
    [(CHAT, b": keep-alive"), (RESPONSES, b": keep-alive"), (MESSAGES, b"event: ping")],
)
async def test_a_silent_stream_is_kept_alive_and_then_goes_on(
    mesh: Mesh, path: str, sign: bytes
) -> None:
    place, ask = Place(mesh.url), Ask("silent", path, fields(path, "quite whole"))
    data = request(path, ask.body(is_stream=True))
    undisturbed = said(ask, await place.ask(data))
    pid = mesh.pid("worker")
    os.kill(pid, signal.SIGSTOP)
    try:
        reader, writer = await asyncio.open_connection(*place.address)
        writer.write(data)
        start = b""
        while start.count(sign) < 3:
            piece = await reader.read(1 << 16)
            assert piece, start
            start += piece
    finally:
        os.kill(pid, signal.SIGCONT)
    answer = parse(start + await reader.read())
    writer.close()
    assert said(ask, answer) == undisturbed
    # Nothing was said in the midst of an event.
    lines = [line for line in answer.body.split(b"\n") if line]
    assert all(line.startswith((b"data:", b"event:", b":")) for line in lines)


async def test_a_stream_over_its_time_ends_with_an_error_and_leaves_nothing(mesh: Mesh) -> None:
    place = Place(mesh.url)
    pid = mesh.pid("worker")
    asks = [
        asyncio.create_task(place.ask(long(path, is_stream=is_stream)))
        for path in (CHAT, RESPONSES, MESSAGES)
        for is_stream in (True, False)
    ]
    await asyncio.to_thread(
        mesh.until, lambda: mesh.metric("vllm:num_requests_running") == 6, 10, "they run"
    )
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*asks)
    finally:
        os.kill(pid, signal.SIGCONT)
    streams, wholes = answers[::2], answers[1::2]
    assert [answer.status for answer in streams] == [200] * 3
    assert [answer.status for answer in wholes] == [504] * 3
    chat, response, message = streams
    assert chat.events()[-1] == "[DONE]"
    assert "deadline_exceeded" in chat.events()[-2]
    assert "deadline_exceeded" in response.events()[-1]
    assert '"type": "error"' in message.events()[-1]
    await asyncio.to_thread(mesh.until_idle)
    ask = Ask("after", CHAT, fields(CHAT, "ok"))
    assert said(ask, await place.ask(request(CHAT, ask.body(is_stream=False))))
