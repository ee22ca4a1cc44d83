import asyncio
import contextlib
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from protos.glm.v1 import worker_pb2
from services.worker.orders import LocalOrders, Stop
from services.worker.parallel.moe_method import MoeMethod
from services.worker.plan import ContractError, StepPlan, StepResult, StepTimings, Tick
from services.worker.prefill_spans import PrefillSpans
from services.worker.replay import ReplayExecutor
from services.worker.runner import Runner
from services.worker.server import (
    WorkerServicer,
    capacity_to_proto,
    plan_from_proto,
    read_plan,
    result_to_proto,
)
from shared.errors import FailureReason, RequestError
from shared.rpc import build_server, error_from_rpc, open_channel
from shared.sampling import ReplayScript
from tests.services.worker.plans import Entry, make_capacity, make_plan, make_sequence
from tests.services.worker.scheduler_client import SchedulerClient, ids_of, plan_message

EOS = 99


class Gate(ReplayExecutor):
    """A replay executor that tests can hold, and that breaks on order."""

    def __init__(self) -> None:
        super().__init__(make_capacity())
        self.may_run = threading.Event()
        self.may_run.set()
        self.is_broken = False

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        assert self.may_run.wait(10)
        if self.is_broken:
            raise ZeroDivisionError("secret text")
        return super().execute(plan, wait_us)


class Worker:
    def __init__(self, address: str, gate: Gate, build: Callable[[], Gate] | None = None) -> None:
        self.address = address
        self.gate = gate
        self.orders = LocalOrders()
        self.runner = Runner(build or (lambda: gate), self.orders)
        self.servicer = WorkerServicer(self.runner, self.orders, PrefillSpans())
        self.server = build_server(address=address)
        self.servicer.add_to(self.server)
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        self.runner.start()
        await self.server.start()

    def connect(self) -> SchedulerClient:
        channel = open_channel(self.address)
        self._channels.append(channel)
        return SchedulerClient(channel)

    async def stop(self) -> None:
        self.gate.may_run.set()
        for channel in self._channels:
            await channel.close()
        await self.server.stop(0)
        self.orders.put(Stop())
        assert self.runner.join(30)


@contextlib.asynccontextmanager
async def running(build: Callable[[], Gate] | None = None) -> AsyncIterator[Worker]:
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(f"unix:{folder}/w.sock", Gate(), build)
        await worker.start()
        if build is None:
            await asyncio.wrap_future(worker.runner.ready)
        try:
            yield worker
        finally:
            await worker.stop()


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    async with running() as one:
        yield one


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # the thread under test has no event to wait for
            await asyncio.sleep(0.005)


def start(*ids: int, row: int = 0, step: int = 1) -> StepPlan:
    new = make_sequence(
        row, [1, 2], script=ReplayScript(token_ids=ids), eos_token_ids=(EOS,), max_tokens=30
    )
    return make_plan(step, {row: Entry(scheduled=2, blocks=(1, 2))}, new=[new])


async def test_capacity_and_the_highest_epoch_can_be_asked_for(worker: Worker) -> None:
    client = worker.connect()
    answer = await client.stub.GetCapacity(worker_pb2.GetCapacityRequest())
    assert answer.epoch == 0
    assert answer.capacity.num_blocks == 64
    opened = await client.open(5)
    assert opened.epoch == 5
    assert opened.capacity == answer.capacity
    assert (await client.stub.GetCapacity(worker_pb2.GetCapacityRequest())).epoch == 5


async def test_a_sequence_runs_to_its_end_over_the_wire(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    first = await client.run(start(7))
    assert ids_of(first) == [7]
    assert list(first.rows) == [0]
    assert list(first.num_computed_tokens) == [0]
    second = await client.run(make_plan(2, {0: Entry(computed=2)}, freed=[0]))
    assert ids_of(second) == [EOS]
    assert list(second.finish_codes) == [worker_pb2.FINISH_CODE_EOS]
    assert worker.runner.num_rows_in_use() == 0


async def test_the_scheduler_may_close_its_side_and_still_gets_its_results(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1, window=2)
    worker.gate.may_run.clear()
    await client.send(start(7, 8))
    await client.send(make_plan(2, {0: Entry(computed=0)}))
    await client.call.done_writing()
    worker.gate.may_run.set()
    assert ids_of(await client.result()) == [7]
    assert ids_of(await client.result()) == [8]
    assert await client.end_code() is grpc.StatusCode.OK
    await until(lambda: worker.runner.num_rows_in_use() == 0)


async def test_an_idle_scheduler_that_closes_ends_its_epoch_well(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    await client.call.done_writing()
    assert await client.end_code() is grpc.StatusCode.OK


async def test_with_two_plans_in_flight_the_row_continues_from_its_own_tokens(
    worker: Worker,
) -> None:
    client = worker.connect()
    await client.open(1, window=2)
    worker.gate.may_run.clear()
    await client.send(start(7, 8))
    await client.send(make_plan(2, {0: Entry(computed=0)}))
    worker.gate.may_run.set()
    assert ids_of(await client.result()) == [7]
    assert ids_of(await client.result()) == [8]


async def test_a_client_that_goes_away_frees_every_row(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    await client.run(start(7, 8, 9))
    assert worker.runner.num_rows_in_use() == 1
    client.call.cancel()
    await until(lambda: worker.runner.num_rows_in_use() == 0)
    await worker.connect().open(2)


async def test_a_client_that_goes_away_during_a_step_frees_every_row(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    worker.gate.may_run.clear()
    await client.send(start(7, 8, 9))
    await until(lambda: worker.runner.stalled_s(float("inf")) > 0)
    client.call.cancel()
    worker.gate.may_run.set()
    other = worker.connect()
    await other.open(2)
    assert worker.runner.num_rows_in_use() == 0
    assert ids_of(await other.run(start(5))) == [5]


async def test_a_higher_epoch_ends_the_present_one(worker: Worker) -> None:
    old, new = worker.connect(), worker.connect()
    await old.open(1)
    await old.run(start(7, 8, 9))
    await new.open(2)
    assert await old.end_code() is grpc.StatusCode.ABORTED
    assert ids_of(await new.run(start(5))) == [5]


@pytest.mark.parametrize("epoch", [3, 4])
async def test_an_epoch_that_is_not_higher_is_refused(worker: Worker, epoch: int) -> None:
    await worker.connect().open(4)
    refusal = await worker.connect().refusal(epoch)
    assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("epoch", [5 + (1 << 20), 2**64 - 1])
async def test_an_epoch_far_above_the_present_one_is_refused(worker: Worker, epoch: int) -> None:
    await worker.connect().open(4)
    refusal = await worker.connect().refusal(epoch)
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await worker.connect().open(4 + (1 << 20))).epoch == 4 + (1 << 20)


@pytest.mark.parametrize("window", [0, 3])
async def test_a_window_other_than_one_or_two_is_refused(worker: Worker, window: int) -> None:
    refusal = await worker.connect().refusal(1, window=window)
    assert refusal.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_must_open_an_epoch_first_and_once(worker: Worker) -> None:
    client = worker.connect()
    client.call = client.stub.RunSteps()
    await client.send(start(7))
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT
    await client.open(1)
    again = worker_pb2.OpenEpoch(scheduler_id="test", epoch=2, max_plans_in_flight=1)
    await client.call.write(worker_pb2.RunStepsRequest(open=again))
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("step", [1, 3, 0])
async def test_a_missing_doubled_or_reordered_step_ends_the_stream(
    worker: Worker, step: int
) -> None:
    client = worker.connect()
    await client.open(1)
    await client.run(start(7, 8))
    await client.send(make_plan(step, {0: Entry(computed=2)}))
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: worker.runner.num_rows_in_use() == 0)


async def test_more_plans_than_the_window_end_the_stream(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    worker.gate.may_run.clear()
    await client.send(start(7, 8))
    await client.send(make_plan(2, {0: Entry(computed=2)}))
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_plan_that_breaks_the_contract_fails_the_step_and_ends_the_stream(
    worker: Worker,
) -> None:
    client = worker.connect()
    await client.open(1)
    await client.send(make_plan(1, {3: Entry()}))
    result = await client.result()
    assert result.failure.reason == FailureReason.INVALID_ARGUMENT
    assert "row 3" in result.failure.message
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_step_that_breaks_tells_an_error_id_and_no_exception_text(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    worker.gate.is_broken = True
    result = await client.run(start(7))
    assert result.failure.reason == FailureReason.INTERNAL
    assert "secret" not in result.failure.message
    assert await client.end_code() is grpc.StatusCode.INTERNAL
    worker.gate.is_broken = False
    assert (await worker.connect().open(2)).epoch == 2


async def test_a_bad_sequence_fails_alone_and_the_others_go_on(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    message = plan_message(start(7))
    bad = message.plan.new_sequences.add(row=1, prompt_token_ids=b"123")
    bad.sampling.max_tokens = 3
    message.plan.rows.append(1)
    message.plan.num_scheduled_tokens.append(1)
    message.plan.num_computed_tokens.append(0)
    message.plan.num_new_blocks.append(0)
    await client.call.write(message)
    result = await client.result()
    assert [entry.row for entry in result.row_failures] == [1]
    assert result.row_failures[0].failure.field == "prompt_token_ids"
    assert list(result.num_sampled_tokens) == [1, 0]
    assert ids_of(result) == [7]


async def test_columns_of_unequal_length_end_the_stream(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    message = plan_message(start(7))
    message.plan.num_computed_tokens.append(0)
    await client.call.write(message)
    assert await client.end_code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_are_unavailable_while_the_model_loads() -> None:
    may_load = threading.Event()

    def build() -> Gate:
        assert may_load.wait(10)
        return Gate()

    async with running(build) as loading:
        client = loading.connect()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.GetCapacity(worker_pb2.GetCapacityRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await client.refusal(1)).code() is grpc.StatusCode.UNAVAILABLE
        may_load.set()
        await asyncio.wrap_future(loading.runner.ready)
        assert (await client.open(1)).epoch == 1


async def test_a_draining_worker_refuses_epochs_and_keeps_the_present_one(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    worker.servicer.drain()
    assert ids_of(await client.run(start(7))) == [7]
    refusal = await worker.connect().refusal(2)
    assert error_from_rpc(refusal).reason is FailureReason.DRAINING


async def test_the_event_loop_answers_while_a_step_runs(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    worker.gate.may_run.clear()
    await client.send(start(7))
    await until(lambda: worker.runner.stalled_s(float("inf")) > 0)
    answer: Awaitable = client.stub.GetCapacity(worker_pb2.GetCapacityRequest())
    assert (await answer).epoch == 1
    assert worker.runner.stalled_s(float("inf")) > 0


def test_a_plan_survives_its_message() -> None:
    plan = start(7, 8)
    back = plan_from_proto(plan_message(plan).plan)
    assert np.array_equal(back.new_blocks, plan.new_blocks)
    assert np.array_equal(back.num_new_blocks, plan.num_new_blocks)
    new, old = back.new_sequences[0], plan.new_sequences[0]
    assert new.prompt_token_ids.tolist() == old.prompt_token_ids.tolist()
    assert (new.sampling, new.replay, new.request_id) == (old.sampling, old.replay, old.request_id)


def test_a_failed_step_has_a_reason_and_empty_columns() -> None:
    failure = RequestError(FailureReason.INTERNAL, "error 5")
    message = result_to_proto(StepResult(step=3, failure=failure))
    assert message.failure.message == "error 5"
    assert not message.rows
    assert message.step == 3


def test_what_a_worker_drafted_is_told() -> None:
    result = StepResult(
        step=3,
        num_drafted_tokens=np.array([3, 0]),
        num_accepted_tokens=np.array([2, 0]),
        timings=StepTimings(draft_us=70),
    )
    message = result_to_proto(result)
    assert list(message.num_drafted_tokens) == [3, 0]
    assert list(message.num_accepted_tokens) == [2, 0]
    assert message.timings.draft_us == 70
    capacity = capacity_to_proto(make_capacity(num_speculative_tokens=4), "1")
    assert capacity.num_speculative_tokens == 4


def ticked(**changes: Any) -> StepPlan:
    values = {
        "num_tokens": 9,
        "method": MoeMethod.ALLTOALL,
        "num_draft_passes": 3,
        "num_draft_rows": 2,
        "captured_num_seqs": 4,
    }
    return replace(start(7), tick=Tick(**(values | changes)))


@pytest.mark.parametrize("method", MoeMethod)
def test_a_tick_survives_its_message(method: MoeMethod) -> None:
    plan = ticked(method=method)
    message = plan_message(plan).plan
    assert plan_from_proto(message).tick == plan.tick
    # As a leader passes it on.
    assert read_plan(message.SerializeToString()).tick == plan.tick
    assert plan_from_proto(plan_message(start(7)).plan).tick is None


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_tokens", 0, "num_tokens of the tick must be at least 1"),
        ("num_draft_rows", 0, "num_draft_rows of the tick must be at least 1"),
        ("moe_method", 0, "moe_method 0 of the tick is not known"),
        ("moe_method", 9, "moe_method 9 of the tick is not known"),
    ],
)
def test_a_tick_that_says_nothing_is_refused(field: str, value: int, said: str) -> None:
    message = plan_message(ticked()).plan
    setattr(message.tick, field, value)
    with pytest.raises(ContractError, match=said):
        plan_from_proto(message)


def test_a_worlds_replica_tells_its_place_and_its_methods() -> None:
    limits = make_capacity(
        data_parallel_size=4,
        data_parallel_rank=2,
        moe_ladder=((64, MoeMethod.MC2), (8192, MoeMethod.ALLTOALL)),
        captured_num_seqs=(1, 2, 8),
    )
    message = capacity_to_proto(limits, "1")
    assert (message.data_parallel_size, message.data_parallel_rank) == (4, 2)
    assert [(one.max_num_tokens, one.method) for one in message.moe_methods] == [
        (64, worker_pb2.MOE_METHOD_MC2),
        (8192, worker_pb2.MOE_METHOD_ALLTOALL),
    ]
    assert list(message.captured_num_seqs) == [1, 2, 8]
    alone = capacity_to_proto(make_capacity(), "1")
    assert alone.data_parallel_size == 1
    assert not alone.moe_methods


async def test_a_worker_that_lost_its_world_says_so_and_takes_no_epoch(worker: Worker) -> None:
    client = worker.connect()
    await client.open(1)
    error = RequestError(FailureReason.UPSTREAM_LOST, "rank 1: its process ended")
    worker.servicer.fail(error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.result()
    assert error_from_rpc(caught.value).message == "rank 1: its process ended"
    refusal = error_from_rpc(await worker.connect().refusal(2))
    assert refusal.reason is FailureReason.UPSTREAM_LOST
