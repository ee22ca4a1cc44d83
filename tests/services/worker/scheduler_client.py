"""A scheduler's side of RunSteps, by hand, for tests over a real channel."""

from typing import Any

import grpc.aio
import numpy as np
import pytest

from protos.glm.v1 import worker_pb2, worker_pb2_grpc
from services.worker.plan import StepPlan, Tick
from shared.sampling import ReplayScript, SamplingSpec
from shared.wire import replay_to_proto, sampling_to_proto


def plan_message(plan: StepPlan) -> worker_pb2.RunStepsRequest:
    return worker_pb2.RunStepsRequest(
        plan=worker_pb2.StepPlan(
            step=plan.step,
            rows=plan.rows.tolist(),
            num_scheduled_tokens=plan.num_scheduled_tokens.tolist(),
            num_computed_tokens=plan.num_computed_tokens.tolist(),
            num_new_blocks=plan.num_new_blocks.tolist(),
            new_blocks=plan.new_blocks.tobytes(),
            new_sequences=[_sequence_message(new) for new in plan.new_sequences],
            freed_rows=plan.freed_rows,
            tick=None if plan.tick is None else _tick_message(plan.tick),
        )
    )


def _tick_message(tick: Tick) -> worker_pb2.Tick:
    return worker_pb2.Tick(
        num_tokens=tick.num_tokens,
        moe_method=f"MOE_METHOD_{tick.method.name}",
        num_draft_passes=tick.num_draft_passes,
        num_draft_rows=tick.num_draft_rows,
        captured_num_seqs=tick.captured_num_seqs,
    )


def _sequence_message(new: Any) -> worker_pb2.NewSequence:
    replay: ReplayScript | None = new.replay
    sampling: SamplingSpec = new.sampling
    return worker_pb2.NewSequence(
        row=new.row,
        request_id=new.request_id,
        prompt_token_ids=new.prompt_token_ids.tobytes(),
        output_token_ids=new.output_token_ids.tobytes(),
        num_computed_tokens=new.num_computed_tokens,
        sampling=sampling_to_proto(sampling),
        replay=replay_to_proto(replay),
        traceparent=new.traceparent,
    )


class SchedulerClient:
    """One epoch."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.call: Any = None

    async def open(self, epoch: int, *, window: int = 1) -> worker_pb2.EpochOpened:
        self.call = self.stub.RunSteps()
        message = worker_pb2.OpenEpoch(scheduler_id="test", epoch=epoch, max_plans_in_flight=window)
        await self.call.write(worker_pb2.RunStepsRequest(open=message))
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        return answer.opened

    async def refusal(self, epoch: int, *, window: int = 1) -> grpc.aio.AioRpcError:
        """Open an epoch that is refused, perhaps before its first message is on its way."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.open(epoch, window=window)
        return caught.value

    async def send(self, plan: StepPlan) -> None:
        await self.call.write(plan_message(plan))

    async def result(self) -> worker_pb2.StepResult:
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF, await self.call.details()
        return answer.result

    async def run(self, plan: StepPlan) -> worker_pb2.StepResult:
        await self.send(plan)
        return await self.result()

    async def end_code(self) -> grpc.StatusCode:
        """Read to the end and tell how it ended."""
        try:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await self.call.code()


def ids_of(result: worker_pb2.StepResult) -> list[int]:
    return np.frombuffer(result.sampled_token_ids, "<u4").tolist()
