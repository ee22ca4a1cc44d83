"""A mesh that is told to stop amid its work: what can end ends, the rest is told."""

import asyncio
import json
import os
import signal
from typing import Any

from tests.e2e.asks import CHAT
from tests.e2e.cancels import status_of
from tests.e2e.mesh import Mesh, is_alive, replay
from tests.e2e.visitors import Answer, Place, request

# Long ones take 8 s in all where nothing else runs, short ones a quarter of a second. The worker
# stands still until all have come, so both times begin with the signal.
SHORT, LONG = "river stone " * 40, "word " * 7000
NUM_SHORT, NUM_LONG, NUM_WHOLE = 20, 30, 10
DRAIN_S = 4


def ask(text: str, *, is_stream: bool) -> bytes:
    body: dict[str, Any] = {"model": "glm-nano", "stream": is_stream, **replay(text)}
    return request(CHAT, {**body, "messages": [{"role": "user", "content": "x"}]})


def text_of(answer: Answer) -> str:
    chunks = [json.loads(event) for event in answer.events()[:-1]]
    pieces = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
    return "".join(piece.get("reasoning") or piece.get("content") or "" for piece in pieces)


async def test_sigterm_with_fifty_streams_ends_or_tells_every_one() -> None:
    mesh = await asyncio.to_thread(
        Mesh, "--worker", "replay", "--drain-timeout-s", str(DRAIN_S), "--max-num-seqs", "128"
    )
    pids = mesh.pids()
    try:
        place = Place(mesh.url)
        os.kill(pids["worker"], signal.SIGSTOP)
        kinds = [(LONG, True)] * NUM_LONG + [(LONG, False)] * NUM_WHOLE
        asking = [
            asyncio.create_task(place.ask(ask(text, is_stream=is_stream)))
            for text, is_stream in (*kinds, *[(SHORT, True)] * NUM_SHORT)
        ]
        async with asyncio.timeout(30):
            while (await status_of(mesh, "frontend")).num_live < len(asking):
                pass
        stopping = asyncio.get_running_loop().run_in_executor(None, mesh.stop, signal.SIGTERM)
        os.kill(pids["worker"], signal.SIGCONT)
        answers = await asyncio.gather(*asking)  # each of them is whole
        assert await stopping == 0
    finally:
        if is_alive(pids["worker"]):
            os.kill(pids["worker"], signal.SIGCONT)
        mesh.stop()
        mesh.remove()
    wholes, streams = answers[NUM_LONG : NUM_LONG + NUM_WHOLE], answers[:NUM_LONG]
    shorts = answers[NUM_LONG + NUM_WHOLE :]
    for answer in wholes:
        assert answer.status == 503
        assert "retry-after" in answer.headers
    for answer in (*streams, *shorts):
        assert answer.status == 200
        assert answer.events()[-1] == "[DONE]"
    assert all('"error"' in answer.events()[-2] for answer in streams), "none had the time"
    ended = [answer for answer in shorts if '"error"' not in answer.events()[-2]]
    assert ended, "none was given time"
    assert {text_of(answer).strip() for answer in ended} == {SHORT.strip()}
    assert not any(is_alive(pid) for pid in pids.values())
