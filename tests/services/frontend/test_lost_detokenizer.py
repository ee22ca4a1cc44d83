"""What clients of each protocol see when a detokenizer is lost under their requests."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import Mesh
from tests.services.frontend.fake_detokenizer import TEXT, Behaviour
from tests.services.frontend.waits import until

TURNS = [{"role": "user", "content": "Hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 9},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}
each_protocol = pytest.mark.parametrize("path", ASKS)


def ask(mesh: Mesh, path: str, **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"model": "nano", **ASKS[path], **fields}
    return asyncio.create_task(mesh.http.post(path, json=body))


async def lose(mesh: Mesh) -> None:
    """Kill the detokenizer, and start it again."""
    await mesh.fake.stop()
    await until(lambda: not mesh.gateway.detokenizers.is_connected)
    mesh.fake.behaviour = Behaviour()
    await mesh.fake.start()


@each_protocol
async def test_a_whole_answer_comes_all_the_same(mesh: Mesh, path: str) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    asking = ask(mesh, path)
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    await lose(mesh)
    answer = await asking
    assert answer.status_code == 200
    assert TEXT in answer.text
    page = (await mesh.http.get("/metrics")).text
    assert 'glm_mesh:request_resubmissions_total{cause="lost"} 1.0' in page
    assert "glm_mesh:num_detokenizers_ready 1.0" in page
    assert mesh.gateway.detokenizers.num_kept_bytes == 0


@each_protocol
async def test_a_stream_without_a_byte_begins_late_and_once(mesh: Mesh, path: str) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    body = {"model": "nano", **ASKS[path], "stream": True}
    async with mesh.http.stream("POST", path, json=body) as answer:
        # The head is out already, the body is not.
        assert answer.status_code == 200
        await lose(mesh)
        text = (await answer.aread()).decode()
    assert text.count("Hel") == 1 or path == "/v1/responses"
    assert "was lost" not in text
    assert len(mesh.fake.submits) == 2


@each_protocol
async def test_a_stream_that_began_ends_with_the_protocols_error(mesh: Mesh, path: str) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=2)
    body = {"model": "nano", **ASKS[path], "stream": True}
    async with mesh.http.stream("POST", path, json=body) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await lose(mesh)
        text += "".join([piece async for piece in pieces])
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    has_done = path not in ("/v1/responses", "/v1/messages")
    assert (events[-1] == "[DONE]") is has_done
    last = json.loads(events[-2 if has_done else -1])
    message = "the connection to the detokenizer was lost"
    if path == "/v1/responses":
        assert (last["type"], last["code"], last["message"]) == (
            *("error", "service_unavailable"),
            message,
        )
    elif path == "/v1/messages":
        assert last["error"] == {"type": "overloaded_error", "message": message}
    else:
        shown = {"type": "server_error", "param": None, "code": "service_unavailable"}
        assert last["error"] == {**shown, "message": message}
    assert len(mesh.fake.submits) == 1


async def test_a_background_response_survives_as_well(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    made = (await ask(mesh, "/v1/responses", background=True)).json()
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    await lose(mesh)
    async with asyncio.timeout(30):
        while True:
            shown = (await mesh.http.get(f"/v1/responses/{made['id']}")).json()
            if shown["status"] != "in_progress":
                break
            await asyncio.sleep(0.02)
    assert shown["status"] == "completed"


async def test_a_client_that_hangs_up_in_the_gap_leaves_nothing(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    asking = ask(mesh, "/v1/chat/completions")
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    await mesh.fake.stop()
    pool = mesh.gateway.detokenizers
    await until(lambda: not pool.is_connected and pool.num_open)
    asking.cancel()
    await until(lambda: not mesh.gateway.admission.num_running)
    await mesh.fake.start()
    await mesh.wait_until_connected()
    assert len(mesh.fake.submits) == 1
    assert pool.num_open == pool.num_kept_bytes == 0


class TestShortBound:
    """A gateway that does not wait long."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"resubmit_timeout_s": 0.3}

    async def test_past_the_bound_a_whole_answer_is_a_503(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(silent_after=0)
        asking = ask(mesh, "/v1/chat/completions")
        await mesh.fake.wait_until(lambda: mesh.fake.submits)
        await mesh.fake.stop()
        response = await asking
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["code"] == "service_unavailable"
