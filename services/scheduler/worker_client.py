"""The gRPC client of a worker group: opens epochs, sends plans, reads results.

Every epoch has its own channel: after a loss nothing is assumed about the peer, and a worker that
comes back is reached at once instead of after a back-off that grew while it was away.
"""

import asyncio
from contextlib import suppress
from typing import cast

import grpc
import grpc.aio

from protos.glm.v1 import worker_pb2, worker_pb2_grpc
from services.scheduler.plan import (
    Capacity,
    NewSequence,
    StepPlan,
    StepResult,
    Tick,
    WorkerContractError,
    WorkerLostError,
)
from shared.constraint import PrepareOrder
from shared.errors import RequestError
from shared.rpc import error_from_rpc, is_task_cancelled, open_channel
from shared.wire import (
    failure_from_proto,
    logprobs_from_proto,
    pack_ids,
    replay_to_proto,
    sampling_to_proto,
    unpack_ids,
)
from shared.wire_constraint import constraint_to_proto

OPEN_TIMEOUT_S = 5.0
# A check takes 20 s at most, and may wait for others.
PREPARE_TIMEOUT_S = 60.0
# A result with logprobs of 1,024 rows is far below; plans are bounded by the worker.
MAX_RECEIVE_MIB = 64
MAX_EPOCH = (1 << 64) - 1


class WorkerSession:
    """One open epoch. One task sends, one receives."""

    def __init__(
        self, channel: grpc.aio.Channel, call: grpc.aio.StreamStreamCall, capacity: Capacity
    ) -> None:
        """Take over an opened call and its channel."""
        self.capacity = capacity
        self._channel = channel
        self._call = call

    async def send(self, plan: StepPlan) -> None:
        """Hand a plan over; WorkerLostError when the stream is broken."""
        try:
            await self._call.write(worker_pb2.RunStepsRequest(plan=plan_to_proto(plan)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            raise WorkerLostError("the stream to the worker broke") from None

    async def receive(self) -> StepResult:
        """The next result; WorkerLostError when none can come, or when the step failed."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise WorkerLostError(_lost_text(error)) from None
        if message is grpc.aio.EOF:
            raise WorkerLostError("the worker ended the stream")
        if message.WhichOneof("message") != "result":
            raise WorkerContractError("the worker sent something else than a result")
        result = result_from_proto(message.result)
        if result.failure is not None:
            raise WorkerLostError(f"step {result.step} failed: {result.failure.reason.name}")
        return result

    async def prepare(self, order: PrepareOrder) -> int:
        """Get a constraint ready; microseconds that it took.

        Raises:
            RequestError: It cannot be used, and why.
            WorkerLostError: The worker cannot be asked.
        """
        request = worker_pb2.PrepareSequenceRequest(
            request_id=order.request_id,
            constraint=constraint_to_proto(order.constraint),
            traceparent=order.traceparent,
            tenant_id=order.tenant_id,
        )
        stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        try:
            answer = await stub.PrepareSequence(request, timeout=PREPARE_TIMEOUT_S)
        except asyncio.CancelledError:
            if is_task_cancelled():
                raise
            # Nobody cancels this task: the channel was closed, and its calls with it.
            raise WorkerLostError("the epoch ended") from None
        except grpc.aio.AioRpcError as error:
            told = error_from_rpc(error)
            if error.code() is grpc.StatusCode.UNAVAILABLE and told.field is None:
                raise WorkerLostError(_lost_text(error)) from None
            raise told from None
        return int(answer.prepare_us)

    async def close(self) -> None:
        """End the epoch."""
        self._call.cancel()
        await self._channel.close()


class WorkerClient:
    """Opens one epoch after the other at a worker's address.

    Args:
        target: Address of the worker leader.
        scheduler_id: Names this process in the worker's log.
        open_timeout_s: For all the steps of opening.
    """

    def __init__(
        self, target: str, *, scheduler_id: str, open_timeout_s: float = OPEN_TIMEOUT_S
    ) -> None:
        """Connect to nobody yet."""
        self._target = target
        self._scheduler_id = scheduler_id
        self._open_timeout_s = open_timeout_s

    async def open(self, max_plans_in_flight: int) -> WorkerSession:
        """Open an epoch above every one that the worker saw.

        Raises:
            WorkerLostError: The worker cannot be reached, still loads, or another epoch won.
            WorkerContractError: It answers what no worker may.
        """
        channel = open_channel(self._target, max_receive_mib=MAX_RECEIVE_MIB)
        try:
            async with asyncio.timeout(self._open_timeout_s):
                return await self._open(channel, max_plans_in_flight)
        except grpc.aio.AioRpcError as error:
            await channel.close()
            raise WorkerLostError(_lost_text(error)) from None
        except TimeoutError:
            await channel.close()
            raise WorkerLostError("the worker did not answer in time") from None
        except BaseException:
            await channel.close()
            raise

    async def _open(self, channel: grpc.aio.Channel, max_plans_in_flight: int) -> WorkerSession:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        answer = await stub.GetCapacity(
            worker_pb2.GetCapacityRequest(), timeout=self._open_timeout_s
        )
        epoch = answer.epoch + 1
        if epoch > MAX_EPOCH:
            raise WorkerContractError(f"the worker has seen epoch {answer.epoch}, none is left")
        # No deadline: the stream lives as long as the epoch; steps are timed by the engine.
        call = stub.RunSteps()
        try:
            opening = worker_pb2.OpenEpoch(
                scheduler_id=self._scheduler_id,
                epoch=epoch,
                max_plans_in_flight=max_plans_in_flight,
            )
            with suppress(asyncio.InvalidStateError):  # a call that ended tells why when read
                await call.write(worker_pb2.RunStepsRequest(open=opening))
            opened = _opened(await call.read(), epoch)
            return WorkerSession(channel, call, capacity_from_proto(opened.capacity))
        except BaseException:
            call.cancel()
            raise


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepPlan:
    """A plan as its message."""
    return worker_pb2.StepPlan(
        step=plan.step,
        rows=plan.rows,
        num_scheduled_tokens=plan.num_scheduled_tokens,
        num_computed_tokens=plan.num_computed_tokens,
        num_new_blocks=plan.num_new_blocks,
        new_blocks=plan.new_blocks.tobytes(),
        new_sequences=[_new_to_proto(new) for new in plan.new_sequences],
        freed_rows=plan.freed_rows,
        tick=None if plan.tick is None else _tick_to_proto(plan.tick),
    )


def _tick_to_proto(tick: Tick) -> worker_pb2.Tick:
    return worker_pb2.Tick(
        num_tokens=tick.num_tokens,
        moe_method=cast("worker_pb2.MoeMethod", tick.moe_method),  # any int, at run time
        num_draft_passes=tick.num_draft_passes,
        num_draft_rows=tick.num_draft_rows,
        captured_num_seqs=tick.captured_num_seqs,
    )


def result_from_proto(message: worker_pb2.StepResult) -> StepResult:
    """A message as a result; WorkerContractError if its bytes are no columns."""
    try:
        return StepResult(
            step=message.step,
            rows=list(message.rows),
            num_computed_tokens=list(message.num_computed_tokens),
            num_sampled_tokens=list(message.num_sampled_tokens),
            token_ids=unpack_ids(message.sampled_token_ids, "sampled_token_ids"),
            finish_codes=list(message.finish_codes),
            logprobs=logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else [],
            row_failures={
                entry.row: failure_from_proto(entry.failure) for entry in message.row_failures
            },
            failure=failure_from_proto(message.failure) if message.HasField("failure") else None,
            num_drafted_tokens=list(message.num_drafted_tokens),
            num_accepted_tokens=list(message.num_accepted_tokens),
            wait_us=message.timings.wait_us,
            num_masks=message.timings.num_masks,
            mask_us=message.timings.mask_us,
            prompt_logprobs=[
                (entry.row, entry.start, logprobs_from_proto(entry.logprobs))
                for entry in message.prompt_logprobs
            ],
        )
    except RequestError as error:
        raise WorkerContractError(f"step {message.step}: {error.message}") from None


def capacity_from_proto(message: worker_pb2.WorkerCapacity) -> Capacity:
    """A message as limits."""
    return Capacity(
        num_blocks=message.num_blocks,
        block_size_tokens=message.block_size_tokens,
        num_rows=message.num_rows,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        model_digest=message.model_digest,
        is_replay=message.is_replay,
        version=message.version,
        num_speculative_tokens=message.num_speculative_tokens,
        data_parallel_size=max(1, message.data_parallel_size),
        data_parallel_rank=message.data_parallel_rank,
        moe_methods=tuple((entry.max_num_tokens, entry.method) for entry in message.moe_methods),
        captured_num_seqs=tuple(message.captured_num_seqs),
    )


def _opened(message: object, epoch: int) -> worker_pb2.EpochOpened:
    """The answer to an opening, if it is one."""
    if not isinstance(message, worker_pb2.RunStepsResponse):
        raise WorkerLostError("the worker ended the stream")
    if message.WhichOneof("message") != "opened" or message.opened.epoch != epoch:
        raise WorkerContractError("the worker did not open the epoch that was asked for")
    return message.opened


def _new_to_proto(new: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        row=new.row,
        request_id=new.request_id,
        prompt_token_ids=pack_ids(new.prompt_token_ids),
        output_token_ids=pack_ids(new.output_token_ids),
        num_computed_tokens=new.num_computed_tokens,
        sampling=sampling_to_proto(new.sampling),
        replay=replay_to_proto(new.replay),
        traceparent=new.traceparent,
    )


def _lost_text(error: grpc.aio.AioRpcError) -> str:
    return f"the worker answered {error.code().name}"
