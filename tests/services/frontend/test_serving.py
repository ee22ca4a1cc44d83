"""The life of a request when something goes wrong: refused, lost, silent, left alone."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from protos.glm.v1 import common_pb2
from tests.services.frontend.conftest import Mesh
from tests.services.frontend.fake_detokenizer import PIECES, TEXT, Behaviour
from tests.services.frontend.waits import until


def events_of(text: str) -> list[str]:
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (common_pb2.FAILURE_REASON_QUEUE_FULL, 429, "rate_limit_exceeded"),
        (common_pb2.FAILURE_REASON_DRAINING, 503, "service_unavailable"),
        (common_pb2.FAILURE_REASON_UPSTREAM_LOST, 503, "service_unavailable"),
        (common_pb2.FAILURE_REASON_CONTEXT_LENGTH_EXCEEDED, 400, "context_length_exceeded"),
        (common_pb2.FAILURE_REASON_KV_CAPACITY_EXCEEDED, 400, "kv_capacity_exceeded"),
        (common_pb2.FAILURE_REASON_INVALID_ARGUMENT, 400, "invalid_value"),
        (common_pb2.FAILURE_REASON_INTERNAL, 500, "internal_error"),
        (common_pb2.FAILURE_REASON_DEADLINE_EXCEEDED, 504, "deadline_exceeded"),
        (common_pb2.FAILURE_REASON_FEATURE_DISABLED, 409, "feature_disabled"),
        (common_pb2.FAILURE_REASON_SLOW_READER, 503, "slow_reader"),
        (common_pb2.FAILURE_REASON_ALREADY_EXISTS, 409, "already_exists"),
        (common_pb2.FAILURE_REASON_CANCELLED, 499, "cancelled"),
        (common_pb2.FAILURE_REASON_NUMERICAL_ERROR, 500, "numerical_error"),
    ],
)
async def test_a_refusal_is_an_http_status_also_for_streams(
    mesh: Mesh, reason: int, status: int, code: str, is_stream: bool
) -> None:
    mesh.fake.behaviour = Behaviour(
        refusal=common_pb2.Failure(reason=reason, message="no", field="n", retry_after_ms=1500)
    )
    response = await mesh.chat(stream=is_stream)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["message"], error["param"]) == (code, "no", "n")
    assert (response.headers.get("retry-after") == "2") is (status in (429, 503))


async def test_a_failure_in_a_stream_is_an_error_event_and_done(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(failure_after=2)
    response = await mesh.chat(stream=True)
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["message"], error["code"]) == ("scheduler lost", "service_unavailable")
    assert len(events) == 4


async def test_a_failure_of_a_whole_answer_is_an_http_status(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(failure_after=0)
    response = await mesh.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"]


async def test_a_body_is_let_go_once_its_request_is_handed_on(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    asking = asyncio.create_task(mesh.chat())
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    assert mesh.gateway.admission.num_running == 1
    assert mesh.gateway.admission.num_held_bytes == 0
    asking.cancel()


async def test_a_detokenizer_that_dies_ends_streams_at_once(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=2)
    async with mesh.http.stream("POST", "/v1/chat/completions", json=_chat(stream=True)) as answer:
        chunks = answer.aiter_text()
        text = await anext(chunks)
        started = time.monotonic()
        await mesh.fake.stop()
        text += "".join([chunk async for chunk in chunks])
    assert time.monotonic() - started < 10  # an end that nobody tells takes 20 s to find
    events = events_of(text)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["type"] == "server_error"


async def test_without_a_detokenizer_requests_are_503_and_come_back_with_it(mesh: Mesh) -> None:
    await mesh.fake.stop()
    while mesh.gateway.detokenizers.is_connected:  # noqa: ASYNC110  # told by no event
        await asyncio.sleep(0.01)
    response = await mesh.chat(stream=True)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await mesh.http.get("/health")).status_code == 503
    await mesh.fake.start()
    await mesh.wait_until_connected()
    assert (await mesh.chat()).json()["choices"][0]["message"]["content"] == TEXT


class TestNoVerdict:
    """A detokenizer that never answers."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"verdict_timeout_s": 0.2}

    async def test_no_verdict_is_a_503_and_an_abort(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(gives_verdict=False)
        response = await mesh.chat(stream=True)
        assert response.status_code == 503
        await mesh.fake.wait_until(lambda: mesh.fake.aborted)


class TestSilence:
    """A detokenizer that takes requests and says little."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"sse_keep_alive_interval": 0.3}

    async def test_a_silent_stream_gets_comment_lines(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(silent_after=0)
        request = mesh.http.stream("POST", "/v1/chat/completions", json=_chat(stream=True))
        async with asyncio.timeout(30), request as answer:
            assert answer.status_code == 200
            assert await anext(answer.aiter_text()) == ": keep-alive\n\n"

    async def test_the_sdk_reads_past_comment_lines(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(pause_s=0.7, pieces=PIECES[:2])
        async with mesh.openai as client:
            stream = await client.chat.completions.create(**_chat(stream=True))
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "Hello "


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_verdict", [False, True])
async def test_a_client_that_hangs_up_aborts_its_request(
    mesh: Mesh, is_stream: bool, has_verdict: bool
) -> None:
    mesh.fake.behaviour = Behaviour(gives_verdict=has_verdict, silent_after=0)
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    body = json.dumps(_chat(stream=is_stream)).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    await mesh.fake.wait_until(lambda: mesh.fake.submits)
    if is_stream and has_verdict:
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
    started = time.monotonic()
    writer.close()
    await mesh.fake.wait_until(lambda: mesh.fake.aborted)
    assert time.monotonic() - started < 5
    assert mesh.fake.aborted == [mesh.fake.submits[0].stream_id]
    await until(lambda: not mesh.gateway.admission.num_running)
    assert mesh.gateway.detokenizers.num_open == 0
    page = (await mesh.http.get("/metrics")).text
    assert "glm_mesh:client_disconnects_total 1.0" in page


async def test_a_client_that_hangs_up_while_sending_leaves_nothing(mesh: Mesh) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{"
    )
    await until(lambda: mesh.gateway.admission.num_running == 1)
    writer.close()
    await until(lambda: mesh.gateway.admission.num_running == 0)
    assert not mesh.fake.submits


async def test_an_answer_read_to_its_end_is_not_aborted(mesh: Mesh) -> None:
    for is_stream in (False, True):
        assert (await mesh.chat(stream=is_stream)).status_code == 200
    await mesh.chat()
    assert mesh.fake.aborted == []
    assert "client_disconnects_total 0.0" in (await mesh.http.get("/metrics")).text


async def test_sixty_four_at_once_each_get_their_own_answer(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(pause_s=0.01)

    async def ask(number: int) -> httpx.Response:
        return await mesh.chat(stream=bool(number % 2), seed=number)

    answers = await asyncio.gather(*(ask(number) for number in range(64)))
    assert all(answer.status_code == 200 for answer in answers)
    seeds = {s.submit.output.response_id: s.submit.sampling.seed for s in mesh.fake.submits}
    for number, answer in enumerate(answers):
        text = answer.text
        first = json.loads(events_of(text)[0]) if number % 2 else json.loads(text)
        assert seeds[first["id"]] == number
        assert text.endswith("data: [DONE]\n\n") or not number % 2
    assert mesh.gateway.detokenizers.num_open == 0
    assert mesh.fake.connections == 1


class TestFull:
    """A gateway with room for one request."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"max_concurrent_requests": 1}

    async def test_past_its_limit_the_gateway_says_429_and_recovers(self, mesh: Mesh) -> None:
        mesh.fake.behaviour = Behaviour(silent_after=0)
        first = asyncio.create_task(mesh.chat())
        await mesh.fake.wait_until(lambda: mesh.fake.submits)
        response = await mesh.chat()
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["type"] == "rate_limit_error"
        first.cancel()
        await until(lambda: not mesh.gateway.admission.num_running)
        mesh.fake.behaviour = Behaviour()
        assert (await mesh.chat()).status_code == 200


class TestReplay:
    """A gateway before a worker that replays."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"worker_mode": "replay"}

    async def test_replay_text_becomes_ids_with_control_tokens(self, mesh: Mesh) -> None:
        await mesh.chat(replay={"text": "a</think>", "tokens_per_step": [1, 3]}, n=2)
        control, script = mesh.gateway.dialect.control, mesh.fake.submits[0].submit.sequences[1]
        assert script.replay.token_ids[-4:] == control.end_think.to_bytes(4, "little")
        assert list(script.replay.tokens_per_step) == [1, 3]

    async def test_a_request_without_output_is_refused(self, mesh: Mesh) -> None:
        error = (await mesh.chat()).json()["error"]
        assert (error["param"], error["code"]) == ("replay", "missing_required_parameter")

    @pytest.mark.parametrize(
        ("replay", "param"),
        [
            ({}, "replay"),
            ({"text": "a", "token_ids": [1]}, "replay"),
            ({"token_ids": [896]}, "replay.token_ids"),
            ({"text": "a", "tokens_per_step": [0]}, "replay.tokens_per_step[0]"),
            ({"text": "a", "tokens_per_step": []}, "replay.tokens_per_step"),
            ({"text": 1}, "replay.text"),
        ],
    )
    async def test_a_wrong_script_is_refused(
        self, mesh: Mesh, replay: dict[str, Any], param: str
    ) -> None:
        response = await mesh.complete(replay=replay)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], **fields}
