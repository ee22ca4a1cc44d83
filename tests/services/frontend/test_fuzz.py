"""Bodies made by a generator: whatever they are, the answer is a clean one."""

import asyncio
import json
from typing import Any

from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.schemas.generate import GenerateRequest
from services.frontend.schemas.messages import MessagesRequest
from services.frontend.schemas.responses import ResponsesRequest

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**25]),
    st.floats(allow_nan=False, allow_infinity=False),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=6))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["type", "text", "role", "name", "5"]), inner, max_size=4),
    ),
    max_leaves=8,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url"])}, optional={"text": LEAVES}
    )
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "tool", "robot", None]),
            "content": st.one_of(LEAVES, PARTS),
            "tool_calls": st.one_of(st.none(), st.lists(VALUES, max_size=2)),
            "tool_call_id": LEAVES,
            "reasoning": LEAVES,
            "name": VALUES,
        },
    ),
    max_size=4,
)
CHAT = st.fixed_dictionaries(
    {"messages": st.one_of(MESSAGES, st.just([{"role": "user", "content": "Hi"}]))},
    optional={name: VALUES for name in ChatRequest.model_fields if name != "messages"},
)
COMPLETION = st.fixed_dictionaries(
    {"prompt": st.one_of(VALUES, st.just("Hi"))},
    optional={name: VALUES for name in CompletionRequest.model_fields if name != "prompt"},
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["message", "function_call", "function_call_output", "reasoning", "odd", None]
            ),
            "role": st.sampled_from(["user", "assistant", "system", "tool", None]),
            "content": st.one_of(LEAVES, PARTS, VALUES),
            "call_id": LEAVES,
            "name": LEAVES,
            "arguments": LEAVES,
            "output": st.one_of(LEAVES, PARTS),
            "summary": VALUES,
            "encrypted_content": LEAVES,
        },
    ),
    max_size=4,
)
RESPONSE = st.fixed_dictionaries(
    {"input": st.one_of(ITEMS, st.just("Hi"), VALUES)},
    optional={name: VALUES for name in ResponsesRequest.model_fields if name != "input"},
)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                ["text", "thinking", "tool_use", "tool_result", "image", "odd", None]
            ),
            "text": LEAVES,
            "thinking": LEAVES,
            "id": LEAVES,
            "name": LEAVES,
            "input": VALUES,
            "tool_use_id": LEAVES,
            "content": st.one_of(LEAVES, PARTS),
        },
    ),
    max_size=3,
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "system", "tool", None]),
            "content": st.one_of(LEAVES, BLOCKS),
        },
    ),
    max_size=4,
)
MESSAGE = st.fixed_dictionaries(
    {
        "model": st.just("nano"),
        "max_tokens": st.one_of(st.just(9), NUMBERS),
        "messages": st.one_of(TURNS, st.just([{"role": "user", "content": "Hi"}])),
    },
    optional={
        name: VALUES
        for name in MessagesRequest.model_fields
        if name not in ("model", "max_tokens", "messages")
    },
)
TOKENS = st.fixed_dictionaries(
    {"token_ids": st.one_of(VALUES, st.just([5, 6]))},
    optional={name: VALUES for name in GenerateRequest.model_fields if name != "token_ids"},
)
FEW = settings(
    max_examples=150,
    deadline=None,
    # To name one takes the place of those that all tests suppress: a slow machine is no failure.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


FEWER = settings(FEW, max_examples=50)


async def post(app: FastAPI, path: str, body: bytes) -> tuple[int, bytes]:
    """One request, straight into the application."""
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": headers,
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


def check(app: FastAPI, path: str, body: Any) -> None:
    status, answer = asyncio.run(post(app, path, json.dumps(body).encode()))
    assert status in {400, 404, 503}, answer
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    if status == 503:
        assert "detokenizer" in error["message"]


@FEW
@given(body=CHAT)
def test_no_chat_body_makes_the_gateway_fail(lone_app: FastAPI, body: Any) -> None:
    check(lone_app, "/v1/chat/completions", body)


@FEW
@given(body=COMPLETION)
def test_no_completions_body_makes_the_gateway_fail(lone_app: FastAPI, body: Any) -> None:
    check(lone_app, "/v1/completions", body)


@FEWER
@given(body=RESPONSE)
def test_no_responses_body_makes_the_gateway_fail(lone_app: FastAPI, body: Any) -> None:
    check(lone_app, "/v1/responses", body)


@FEWER
@given(body=TOKENS)
def test_no_body_of_tokens_makes_the_gateway_fail(lone_app: FastAPI, body: Any) -> None:
    check(lone_app, "/inference/v1/generate", body)


@FEWER
@given(body=MESSAGE)
def test_no_messages_body_makes_the_gateway_fail(lone_app: FastAPI, body: Any) -> None:
    status, answer = asyncio.run(post(lone_app, "/v1/messages", json.dumps(body).encode()))
    assert status in {400, 503}, answer
    assert json.loads(answer)["error"]["message"]
