"""A client may enter at any level: text events, token ids, health, admin, rendering."""

from array import array

import grpc.aio
import pytest

from protos.glm.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    frontend_pb2,
    frontend_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from shared.errors import FailureReason
from shared.health import probe
from shared.rpc import error_from_rpc, open_channel
from tests.e2e.mesh import SERVICES, Mesh


def ids(*values: int) -> bytes:
    return array("I", values).tobytes()


def submit(num_tokens: int, request_id: str) -> scheduler_pb2.SchedulerServiceGenerateRequest:
    sequence = common_pb2.SequenceSpec(
        stream_id=1,
        prompt_token_ids=ids(5, 6, 7),
        replay=common_pb2.ReplayScript(token_ids=ids(*(20 + n % 500 for n in range(num_tokens)))),
    )
    sampling = common_pb2.SamplingParams(
        top_p=1, repetition_penalty=1, max_tokens=num_tokens + 5, eos_token_ids=[1]
    )
    return scheduler_pb2.SchedulerServiceGenerateRequest(
        submit=scheduler_pb2.TokenSubmit(
            request_id=request_id, sequences=[sequence], sampling=sampling
        )
    )


@pytest.mark.parametrize("service", SERVICES)
async def test_every_service_tells_its_health_and_status(replayed: Mesh, service: str) -> None:
    address = replayed.address(service, "health_address")
    assert await probe(address, timeout_s=30) == "SERVING"
    async with open_channel(replayed.address(service, "admin_address")) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        status = await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)
    assert status.service == service
    assert not status.not_serving_reason
    assert not status.is_draining


async def test_token_ids_in_token_ids_out_at_the_scheduler(replayed: Mesh) -> None:
    async with open_channel(replayed.address("scheduler")) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        tokens, ends = array("I"), []
        async for answer in stub.Generate(submit(4, "edge-1"), timeout=30):
            tokens.frombytes(answer.tokens.token_ids)
            ends += list(answer.ends)
    assert list(tokens)[:4] == [20, 21, 22, 23]
    assert [end.WhichOneof("end") for end in ends] == ["finished"]
    assert ends[0].finished.reason == common_pb2.FINISH_REASON_STOP


async def test_cancelling_at_the_scheduler_frees_its_blocks(replayed: Mesh) -> None:
    async with open_channel(replayed.address("scheduler")) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.Generate(submit(4000, "edge-2"), timeout=30)
        try:
            assert await call.read()
        finally:
            call.cancel()
    replayed.until_idle()


async def test_a_refusal_at_the_edge_names_its_field(replayed: Mesh) -> None:
    request = submit(4, "edge-3")
    request.submit.sequences[0].prompt_token_ids = b"\x01\x02\x03"
    async with open_channel(replayed.address("scheduler")) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in stub.Generate(request, timeout=30):
                pass
    error = error_from_rpc(failure.value)
    assert error.reason is FailureReason.INVALID_ARGUMENT
    assert "prompt_token_ids" in error.message


async def test_aborting_an_unknown_request_succeeds(replayed: Mesh) -> None:
    async with open_channel(replayed.address("scheduler")) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.Abort(
            scheduler_pb2.SchedulerServiceAbortRequest(request_id="nobody"), timeout=30
        )


async def test_a_conversation_can_be_rendered_alone(replayed: Mesh) -> None:
    async with open_channel(replayed.address("frontend")) as channel:
        stub = frontend_pb2_grpc.FrontendServiceStub(channel)
        message = frontend_pb2.ChatMessage(role="user", content="hi")
        answer = await stub.Render(frontend_pb2.RenderRequest(messages=[message]), timeout=30)
    assert len(answer.token_ids) == 4 * answer.num_tokens > 0
    assert answer.starts_in_reasoning
