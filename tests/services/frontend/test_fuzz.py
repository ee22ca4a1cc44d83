"""Bodies made by a generator: whatever they are, the answer is a clean one."""

import asyncio
import json
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.app import create_app
from services.frontend.gateway import Gateway
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest

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
FEW = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check(gateway: Gateway, path: str, body: Any) -> None:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(gateway))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body)

    response = asyncio.run(post())
    assert response.status_code in {400, 404, 503}, response.text
    error = json.loads(response.content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    if response.status_code == 503:
        assert "detokenizer" in error["message"]


@FEW
@given(body=CHAT)
def test_no_chat_body_makes_the_gateway_fail(lone_gateway: Gateway, body: Any) -> None:
    check(lone_gateway, "/v1/chat/completions", body)


@FEW
@given(body=COMPLETION)
def test_no_completions_body_makes_the_gateway_fail(lone_gateway: Gateway, body: Any) -> None:
    check(lone_gateway, "/v1/completions", body)
