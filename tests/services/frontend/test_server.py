"""Render and Abort over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.glm.v1 import frontend_pb2, frontend_pb2_grpc
from services.frontend.server import build_server, chat_body
from shared import rpc
from shared.errors import FailureReason
from tests.services.frontend.conftest import Mesh
from tests.services.frontend.fake_detokenizer import Behaviour

USER = frontend_pb2.ChatMessage(role="user", content="Hi")


@pytest.fixture
async def stub(mesh: Mesh) -> AsyncIterator[Any]:
    address = mesh.gateway.settings.address
    server = build_server(mesh.gateway, address)
    await server.start()
    async with rpc.open_channel(address) as channel:
        yield frontend_pb2_grpc.FrontendServiceStub(channel)
    await server.stop(0)


async def test_render_gives_the_ids_that_http_submits(mesh: Mesh, stub: Any) -> None:
    rendered = await stub.Render(frontend_pb2.RenderRequest(messages=[USER]), timeout=30)
    await mesh.chat()
    assert rendered.token_ids == mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    assert rendered.num_tokens == len(rendered.token_ids) // 4
    assert rendered.starts_in_reasoning


async def test_render_takes_tools_calls_and_switches(mesh: Mesh, stub: Any) -> None:
    request = frontend_pb2.RenderRequest(
        messages=[
            USER,
            frontend_pb2.ChatMessage(
                role="assistant",
                reasoning="hm",
                tool_calls=[
                    frontend_pb2.ChatToolCall(id="c1", name="add", arguments_json=b'{"a": 1}')
                ],
            ),
            frontend_pb2.ChatMessage(role="tool", tool_call_id="c1", content="2"),
        ],
        tools=[
            frontend_pb2.ChatTool(
                name="add", description="Adds", parameters_json=b'{"type": "object"}'
            ),
            frontend_pb2.ChatTool(name="now"),
        ],
        enable_thinking=False,
        add_generation_prompt=False,
    )
    rendered = await stub.Render(request, timeout=30)
    ids = memoryview(rendered.token_ids).cast("I")
    text = mesh.gateway.dialect.decode(ids)
    assert "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>" in text
    assert text.endswith("<tool_response>2</tool_response>")
    assert '"description": "Adds"' in text
    assert not rendered.starts_in_reasoning


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (frontend_pb2.RenderRequest(), "messages"),
        (
            frontend_pb2.RenderRequest(messages=[frontend_pb2.ChatMessage(role="robot")]),
            "messages[0].role",
        ),
        (
            frontend_pb2.RenderRequest(
                messages=[USER], tools=[frontend_pb2.ChatTool(name="a", parameters_json=b"{")]
            ),
            "tools[0].parameters_json",
        ),
        (
            frontend_pb2.RenderRequest(messages=[USER], reasoning_effort="bogus"),
            "chat_template_kwargs.reasoning_effort",
        ),
    ],
)
async def test_what_cannot_be_rendered_is_invalid_and_names_its_field(
    stub: Any, request_: frontend_pb2.RenderRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Render(request_, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = rpc.error_from_rpc(caught.value)
    assert (error.reason, error.field) == (FailureReason.INVALID_ARGUMENT, field)


async def test_a_prompt_over_the_context_is_out_of_range(stub: Any) -> None:
    message = frontend_pb2.ChatMessage(role="user", content="x" * 2_000_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Render(frontend_pb2.RenderRequest(messages=[message]), timeout=30)
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_abort_takes_the_id_of_the_http_answer(mesh: Mesh, stub: Any) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=1)
    request = mesh.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True})
    async with request:
        await mesh.fake.wait_until(lambda: mesh.fake.submits)
        answer_id = mesh.fake.submits[0].submit.output.response_id
        found = await stub.Abort(
            frontend_pb2.FrontendServiceAbortRequest(request_id=answer_id), timeout=5
        )
        assert found.num_aborted == 1
    none = await stub.Abort(frontend_pb2.FrontendServiceAbortRequest(request_id="x"), timeout=30)
    assert none.num_aborted == 0


def test_unset_switches_stay_unset() -> None:
    body = chat_body(frontend_pb2.RenderRequest(messages=[USER]))
    assert body == {"messages": [{"role": "user", "content": "Hi"}]}


async def test_both_doors_share_one_event_loop(stub: Any) -> None:
    calls = [
        stub.Render(frontend_pb2.RenderRequest(messages=[USER]), timeout=30) for _ in range(20)
    ]
    answers = await asyncio.gather(*calls)
    assert len({answer.token_ids for answer in answers}) == 1
