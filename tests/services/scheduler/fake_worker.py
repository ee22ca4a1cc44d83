"""A worker peer for service tests: a real gRPC server around the simulated worker."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace

import grpc
import grpc.aio

from protos.glm.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.plan import Capacity, NewSequence, StepPlan, StepResult
from shared.errors import FailureReason, RequestError
from shared.rpc import build_server
from shared.wire import (
    failure_to_proto,
    logprobs_to_proto,
    pack_ids,
    replay_from_proto,
    sampling_from_proto,
    unpack_ids,
)
from tests.services.scheduler.simulated_worker import SimulatedWorker

SMALL = Capacity(
    num_blocks=65,
    block_size_tokens=4,
    num_rows=32,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    max_model_len=128,
    vocab_size=50_000,
)


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Obeys RunSteps.

    `gate` holds results back while cleared; `twist` may change a result before it leaves;
    `is_loading` answers UNAVAILABLE as a worker does before it has its model.
    """

    def __init__(self, capacity: Capacity = SMALL) -> None:
        self.capacity = capacity
        self.simulated = SimulatedWorker(capacity)
        self.epochs: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.twist: Callable[[worker_pb2.StepResult], None] = lambda _: None
        self.is_loading = False
        self.plans: list[StepPlan] = []
        self.plan_seen = asyncio.Event()
        self.step_s = 0.0
        self.prepared: list[worker_pb2.PrepareSequenceRequest] = []
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        # Alternatives per token that asked for any, to make results wide.
        self.num_padding_logprobs = 0

    async def GetCapacity(
        self, request: worker_pb2.GetCapacityRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetCapacityResponse:
        if self.is_loading:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        return worker_pb2.GetCapacityResponse(
            capacity=self._capacity(), epoch=max(self.epochs, default=0)
        )

    async def PrepareSequence(
        self, request: worker_pb2.PrepareSequenceRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PrepareSequenceResponse:
        self.prepared.append(request)
        await self.may_prepare.wait()
        if request.constraint.format.text == "bad":
            raise RequestError(
                FailureReason.INVALID_ARGUMENT, "format: is bad", field="constraint.format"
            )
        return worker_pb2.PrepareSequenceResponse(prepare_us=7)

    async def RunSteps(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        opening = (await context.read()).open
        assert opening.epoch > max(self.epochs, default=0)
        self.epochs.append(opening.epoch)
        self.simulated = SimulatedWorker(self.capacity)
        opened = worker_pb2.EpochOpened(epoch=opening.epoch, capacity=self._capacity())
        await context.write(worker_pb2.RunStepsResponse(opened=opened))
        while (message := await context.read()) is not grpc.aio.EOF:
            plan = plan_from_proto(message.plan)
            self.plans.append(plan)
            self.plan_seen.set()
            result = result_to_proto(self._widened(self.simulated.run(plan)))
            self.twist(result)
            await asyncio.sleep(self.step_s)
            await self.gate.wait()
            await context.write(worker_pb2.RunStepsResponse(result=result))

    def _widened(self, result: StepResult) -> StepResult:
        width = self.num_padding_logprobs
        if width:
            top = (tuple(range(width)), (-1.0,) * width)
            result.logprobs[:] = [
                replace(entry, top_token_ids=top[0], top_logprobs=top[1])
                for entry in result.logprobs
            ]
        return result

    def _capacity(self) -> worker_pb2.WorkerCapacity:
        names = (
            "num_blocks block_size_tokens num_rows max_num_seqs max_num_batched_tokens "
            "max_model_len vocab_size is_replay num_speculative_tokens"
        )
        return worker_pb2.WorkerCapacity(
            **{name: getattr(self.capacity, name) for name in names.split()}
        )


async def serve_worker(worker: FakeWorker, address: str) -> grpc.aio.Server:
    """Start the peer; the caller stops the server."""
    server = build_server(address=address)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    await server.start()
    return server


def plan_from_proto(message: worker_pb2.StepPlan) -> StepPlan:
    return StepPlan(
        step=message.step,
        rows=list(message.rows),
        num_scheduled_tokens=list(message.num_scheduled_tokens),
        num_computed_tokens=list(message.num_computed_tokens),
        num_new_blocks=list(message.num_new_blocks),
        new_blocks=unpack_ids(message.new_blocks, "new_blocks"),
        new_sequences=[_new_from_proto(new) for new in message.new_sequences],
        freed_rows=list(message.freed_rows),
    )


def result_to_proto(result: StepResult) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step=result.step,
        rows=result.rows,
        num_computed_tokens=result.num_computed_tokens,
        num_sampled_tokens=result.num_sampled_tokens,
        sampled_token_ids=pack_ids(result.token_ids),
        finish_codes=result.finish_codes,
        logprobs=logprobs_to_proto(result.logprobs),
        row_failures=[
            worker_pb2.RowFailure(row=row, failure=failure_to_proto(error))
            for row, error in result.row_failures.items()
        ],
        failure=None if result.failure is None else failure_to_proto(result.failure),
        num_drafted_tokens=result.num_drafted_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
    )


def _new_from_proto(message: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        row=message.row,
        request_id=message.request_id,
        prompt_token_ids=array("I", unpack_ids(message.prompt_token_ids, "prompt")),
        output_token_ids=array("I", unpack_ids(message.output_token_ids, "output")),
        num_computed_tokens=message.num_computed_tokens,
        sampling=sampling_from_proto(message.sampling),
        replay=replay_from_proto(message.replay) if message.HasField("replay") else None,
        traceparent=message.traceparent,
    )
