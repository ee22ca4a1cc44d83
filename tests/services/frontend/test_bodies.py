"""Hostile bodies: every one ends in a clean answer, and the next request is served."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.frontend.bodies import decode, read_body
from services.frontend.errors import ApiError
from tests.services.frontend.conftest import NAME, Mesh

CHAT = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}


def chat_with(fragment: str) -> bytes:
    messages = '"messages": [{"role": "user", "content": "Hi"}]'
    return f'{{"model": "{NAME}", {messages}, {fragment}}}'.encode()


MALFORMED: list[tuple[bytes, str | None, str]] = [
    (b"", None, "invalid_json"),
    (b"null", None, "invalid_type"),
    (b"[]", None, "invalid_type"),
    (b'"text"', None, "invalid_type"),
    (b"{", None, "invalid_json"),
    (b"{'a': 1}", None, "invalid_json"),
    (b'{"a": 1,}', None, "invalid_json"),
    (b'{"a": 01}', None, "invalid_json"),
    (b"\xef\xbb\xbf{}", None, "invalid_json"),
    (b'{"a": "\xff\xfe"}', None, "invalid_utf8"),
    (b'{"a": "\xed\xa0\x80"}', None, "invalid_utf8"),
    (b"[" * 100_000, None, "invalid_json"),
    (b'{"a":' * 100_000, None, "invalid_json"),
    (chat_with('"temperature": NaN'), "temperature", "invalid_value"),
    (chat_with('"temperature": -Infinity'), "temperature", "invalid_value"),
    (chat_with('"temperature": 1e999'), "temperature", "invalid_value"),
    (chat_with('"logit_bias": {"5": NaN}'), "logit_bias.5", "invalid_value"),
    (chat_with('"stop": "\\ud800"'), "stop", "invalid_value"),
    (chat_with('"stop": ["a", "\\udc00x"]'), "stop[1]", "invalid_value"),
    (chat_with('"\\ud800": 1'), None, "invalid_value"),
    (chat_with('"seed": ' + "9" * 5000), None, "invalid_json"),
    (b'{"messages": [{"content": "a\\ud83d"}]}', "messages[0].content", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), MALFORMED, ids=lambda value: str(value)[:50])
async def test_a_malformed_body_is_a_400_in_the_envelope(
    lone: httpx.AsyncClient, body: bytes, param: str | None, code: str
) -> None:
    response = await lone.post(CHAT, content=body, headers=JSON_TYPE)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
async def test_a_wrong_content_type_is_a_400(lone: httpx.AsyncClient, kind: str) -> None:
    response = await lone.post(CHAT, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_content_type"


@pytest.mark.parametrize(
    ("coding", "is_taken"), [("gzip", False), ("br", False), ("Identity", True)]
)
async def test_a_body_that_is_packed_is_refused_by_that(
    lone: httpx.AsyncClient, coding: str, is_taken: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    response = await lone.post(CHAT, json=body, headers={"content-encoding": coding})
    error = response.json()["error"]
    if is_taken:
        assert response.status_code == 503  # nobody behind this gateway
    else:
        assert (response.status_code, error["code"]) == (400, "invalid_content_encoding")
        assert coding in error["message"]


@pytest.mark.parametrize("codings", [("identity", "gzip"), ("gzip", "identity"), ("identity", "")])
async def test_every_line_that_names_a_packing_counts(
    lone: httpx.AsyncClient, codings: tuple[str, str]
) -> None:
    headers = [*JSON_TYPE.items(), *(("content-encoding", coding) for coding in codings)]
    response = await lone.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_content_encoding"


def test_a_valid_surrogate_pair_is_one_character() -> None:
    assert decode(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"stop": ["a", "\udfff"]}, "stop[1]"),
        ({"tools": [{"type": "function", "function": {"name": "\ud800"}}]},
         "tools[0].function.name"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"nobody_knows": {"it": ["\ud800"]}}, "nobody_knows.it[0]"),
    ],
)  # fmt: skip
async def test_half_a_surrogate_pair_is_refused_wherever_it_stands(
    lone: httpx.AsyncClient, fields: dict[str, Any], path: str
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], **fields})
    headers = {"content-type": "application/json"}
    response = await lone.post("/v1/chat/completions", content=body, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert error["param"] == path


def test_the_last_of_two_equal_keys_counts() -> None:
    assert decode(b'{"a": 1, "a": 2}') == {"a": 2}


def test_large_integers_keep_their_digits() -> None:
    assert decode(b'{"a": 123456789012345678901234567890}') == {"a": 123456789012345678901234567890}


async def test_deep_tool_schemas_are_refused_by_name(lone: httpx.AsyncClient) -> None:
    deep: Any = {}
    for _ in range(200):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "now", "parameters": deep}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    error = (await lone.post(CHAT, json=body)).json()["error"]
    assert error["param"] == "tools[0]"
    assert "64 levels" in error["message"]


@pytest.mark.parametrize(
    "text", ["word " * 1_000_000, "a" * 5_000_000, "<|user|>" * 625_000, "\u6c49" * 1_700_000]
)
async def test_five_megabytes_of_text_are_refused_at_once(mesh: Mesh, text: str) -> None:
    async with asyncio.timeout(30):
        response = await mesh.chat(messages=[{"role": "user", "content": text}])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (await mesh.chat()).status_code == 200


async def test_many_small_messages_are_refused_too(mesh: Mesh) -> None:
    messages = [{"role": "user", "content": "x"}] * 8193
    error = (await mesh.chat(messages=messages)).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "array_above_max_length")


async def test_a_body_over_the_limit_is_a_413_that_the_client_can_read(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.http_protocol.LISTEN_S", 30)
    content = json.dumps({"prompt": "x" * (17 << 20)}).encode()
    response = await mesh.http.post("/v1/completions", content=content, headers=JSON_TYPE)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert (await mesh.chat()).status_code == 200


class TestLittleRoom:
    """A gateway with room for one large body at a time."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"max_body_bytes": 1 << 20, "max_held_body_bytes": 1 << 20}

    async def test_large_bodies_at_once_do_not_add_up_in_memory(self, mesh: Mesh) -> None:
        async def half_a_body() -> asyncio.StreamWriter:
            _, writer = await asyncio.open_connection("127.0.0.1", mesh.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 900000\r\n\r\n" + b" " * 800_000
            )
            return writer

        writer = await half_a_body()
        async with asyncio.timeout(30):
            while mesh.gateway.admission.num_held_bytes < 800_000:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        response = await mesh.complete(prompt="x" * 500_000)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert (await mesh.complete()).status_code == 200
        writer.close()
        async with asyncio.timeout(30):
            while mesh.gateway.admission.num_held_bytes:  # noqa: ASYNC110  # told by no event
                await asyncio.sleep(0.01)


async def test_a_body_declared_far_too_large_is_not_read() -> None:
    scope = {"headers": [(b"content-type", b"application/json"), (b"content-length", b"9" * 12)]}
    with pytest.raises(ApiError) as caught:
        await read_body(scope, _never, max_bytes=10, timeout_s=1)
    assert caught.value.status == 413


async def test_a_body_without_declared_length_is_bounded_too() -> None:
    async def endless() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    scope = {"headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError) as caught:
        await read_body(scope, endless, max_bytes=10, timeout_s=1)
    assert caught.value.status == 413


async def test_a_body_that_does_not_come_is_a_408() -> None:
    scope = {"headers": [(b"content-type", b"application/json")]}
    with pytest.raises(ApiError) as caught:
        await read_body(scope, _never, max_bytes=10, timeout_s=0.01)
    assert caught.value.status == 408


async def _never() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}
