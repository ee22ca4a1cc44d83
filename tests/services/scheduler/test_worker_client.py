"""Opening epochs and reading results; the peer is a fake worker on a unix socket."""

import asyncio
import shutil
import tempfile
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest

from protos.glm.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.scheduler.plan import (
    Capacity,
    NewSequence,
    StepPlan,
    Tick,
    WorkerContractError,
    WorkerLostError,
)
from services.scheduler.worker_client import (
    WorkerClient,
    capacity_from_proto,
    plan_to_proto,
    result_from_proto,
)
from shared.constraint import Constraint, FormatKind, PrepareOrder, TextFormat
from shared.errors import FailureReason
from shared.rpc import build_server
from shared.sampling import SamplingSpec, TokenLogprobs
from shared.wire import logprobs_to_proto, pack_ids
from tests.services.scheduler.fake_worker import (
    SMALL,
    FakeWorker,
    plan_from_proto,
    serve_worker,
)

PLAN = StepPlan(
    step=1,
    rows=[3],
    num_scheduled_tokens=[2],
    num_computed_tokens=[0],
    num_new_blocks=[1],
    new_blocks=array("I", [9]),
    new_sequences=[
        NewSequence(
            row=3,
            request_id="r",
            prompt_token_ids=array("I", [1]),
            output_token_ids=array("I", [2]),
            num_computed_tokens=0,
            sampling=SamplingSpec(max_tokens=4, seed=7, num_logprobs=2),
            replay=None,
            traceparent="00-a-b-01",
        )
    ],
    freed_rows=[5, 6],
)


@pytest.fixture
def folder() -> AsyncIterator[str]:
    path = tempfile.mkdtemp(prefix="glm-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def worker(folder: str) -> AsyncIterator[FakeWorker]:
    fake = FakeWorker()
    server = await serve_worker(fake, f"unix:{folder}/w")
    yield fake
    fake.gate.set()
    await server.stop(0)


def client(folder: str, timeout_s: float = 30.0) -> WorkerClient:
    return WorkerClient(f"unix:{folder}/w", scheduler_id="test", open_timeout_s=timeout_s)


async def test_each_epoch_is_above_the_one_before(folder: str, worker: FakeWorker) -> None:
    for _ in range(3):
        session = await client(folder).open(1)
        await session.close()
    assert worker.epochs == [1, 2, 3]
    assert session.capacity.num_blocks == SMALL.num_blocks
    assert session.capacity.max_model_len == SMALL.max_model_len


async def test_a_plan_and_its_result_cross_unchanged(folder: str, worker: FakeWorker) -> None:
    session = await client(folder).open(1)
    plan = replace(PLAN, freed_rows=[])
    await session.send(plan)
    result = await session.receive()
    assert worker.plans == [plan]
    assert (result.step, result.rows, result.num_computed_tokens) == (1, [3], [0])
    assert (result.num_sampled_tokens, len(result.token_ids)) == ([1], 1)
    assert result.logprobs == [TokenLogprobs(logprob=-float(result.token_ids[0]), rank=1)]
    await session.close()


async def test_nobody_there_is_a_lost_worker(folder: str) -> None:
    with pytest.raises(WorkerLostError, match="UNAVAILABLE"):
        await client(folder).open(1)


async def test_a_worker_that_loads_is_a_lost_worker(folder: str, worker: FakeWorker) -> None:
    worker.is_loading = True
    with pytest.raises(WorkerLostError, match="UNAVAILABLE"):
        await client(folder).open(1)


async def test_a_worker_that_does_not_answer_is_given_up(folder: str) -> None:
    class Silent(FakeWorker):
        async def RunSteps(self, request_iterator: object, context: object) -> None:
            await asyncio.Event().wait()

    server = await serve_worker(Silent(), f"unix:{folder}/w")
    with pytest.raises(WorkerLostError, match="did not answer in time"):
        await client(folder, timeout_s=0.2).open(1)
    await server.stop(0)


async def test_a_killed_worker_is_noticed_at_once(folder: str) -> None:
    fake = FakeWorker()
    server = await serve_worker(fake, f"unix:{folder}/w")
    session = await client(folder).open(1)
    receiving = asyncio.create_task(session.receive())
    await asyncio.sleep(0.05)
    await server.stop(0)
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(receiving, 30)
    with pytest.raises(WorkerLostError):
        await session.send(PLAN)
    await session.close()


async def test_who_waits_for_a_worker_to_get_ready_hears_that_its_epoch_ended(
    folder: str, worker: FakeWorker
) -> None:
    """A worker that is frozen answers nothing: only the closed channel ends the call."""
    session = await client(folder).open(1)
    worker.may_prepare.clear()
    constraint = Constraint(format=TextFormat(kind=FormatKind.REGEX, text="a+"))
    order = PrepareOrder(constraint=constraint, request_id="r", tenant_id="t1")
    waiting = asyncio.create_task(session.prepare(order))
    given_up = asyncio.create_task(session.prepare(order))
    async with asyncio.timeout(30):
        while len(worker.prepared) < 2:  # noqa: ASYNC110  # a servicer has no event for it
            await asyncio.sleep(0.01)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await session.close()
        with pytest.raises(WorkerLostError, match="the epoch ended"):
            await waiting
    worker.may_prepare.set()


async def test_a_worker_that_ends_the_stream_is_lost(folder: str, worker: FakeWorker) -> None:
    session = await client(folder).open(1)
    await session._call.done_writing()  # the peer ends when we do
    with pytest.raises(WorkerLostError, match="ended the stream"):
        await session.receive()
    await session.close()


async def test_a_failed_step_is_told_by_its_reason_alone(folder: str, worker: FakeWorker) -> None:
    def twist(result: worker_pb2.StepResult) -> None:
        result.failure.reason = common_pb2.FAILURE_REASON_INTERNAL
        result.failure.message = "secret text of another process"

    worker.twist = twist
    session = await client(folder).open(1)
    await session.send(replace(PLAN, freed_rows=[]))
    with pytest.raises(WorkerLostError, match=r"^step 1 failed: INTERNAL$"):
        await session.receive()
    await session.close()


class Odd(worker_pb2_grpc.WorkerServiceServicer):
    """Answers an opening with whatever a test wants."""

    def __init__(self, *answers: worker_pb2.RunStepsResponse, epoch: int = 4) -> None:
        self.answers = answers
        self.epoch = epoch

    async def GetCapacity(self, request: object, context: object) -> worker_pb2.GetCapacityResponse:
        return worker_pb2.GetCapacityResponse(epoch=self.epoch)

    async def RunSteps(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await context.read()
        for answer in self.answers:
            await context.write(answer)
        await context.read()


CAPACITY = worker_pb2.WorkerCapacity(
    num_blocks=9, block_size_tokens=4, num_rows=4, max_num_seqs=2, max_num_batched_tokens=8,
    max_model_len=16,
)  # fmt: skip
OPENED = worker_pb2.RunStepsResponse(opened=worker_pb2.EpochOpened(epoch=5, capacity=CAPACITY))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            worker_pb2.RunStepsResponse(opened=worker_pb2.EpochOpened(epoch=4, capacity=CAPACITY)),
            "did not open the epoch",
        ),
        (worker_pb2.RunStepsResponse(result=worker_pb2.StepResult(step=1)), "did not open"),
        (worker_pb2.RunStepsResponse(opened=worker_pb2.EpochOpened(epoch=5)), "num_blocks is 0"),
    ],
)
async def test_an_odd_answer_to_the_opening_breaks_the_contract(
    folder: str, answer: worker_pb2.RunStepsResponse, message: str
) -> None:
    server = build_server(address=f"unix:{folder}/w")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Odd(answer), server)
    await server.start()
    with pytest.raises(WorkerContractError, match=message):
        await client(folder).open(1)
    await server.stop(0)


async def test_a_second_opening_in_place_of_a_result_breaks_the_contract(folder: str) -> None:
    server = build_server(address=f"unix:{folder}/w")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Odd(OPENED, OPENED), server)
    await server.start()
    session = await client(folder).open(1)
    with pytest.raises(WorkerContractError, match="something else than a result"):
        await session.receive()
    await session.close()
    await server.stop(0)


def test_every_column_of_a_plan_is_on_the_wire() -> None:
    message = worker_pb2.StepPlan.FromString(plan_to_proto(PLAN).SerializeToString())
    assert plan_from_proto(message) == PLAN


def test_a_result_is_read_with_its_failures_and_logprobs() -> None:
    logprobs = [TokenLogprobs(logprob=-0.5, rank=2, top_token_ids=(4,), top_logprobs=(-0.25,))]
    message = worker_pb2.StepResult(
        step=2,
        rows=[1, 2],
        num_computed_tokens=[0, 8],
        num_sampled_tokens=[1, 0],
        sampled_token_ids=pack_ids([77]),
        finish_codes=[1, 0],
        logprobs=logprobs_to_proto(logprobs),
        num_drafted_tokens=[3, 0],
        num_accepted_tokens=[2, 0],
        timings=worker_pb2.StepTimings(wait_us=250),
    )
    failure = message.row_failures.add(row=2)
    failure.failure.reason = common_pb2.FAILURE_REASON_NUMERICAL_ERROR
    result = result_from_proto(message)
    assert result.token_ids.tolist() == [77]
    assert result.finish_codes == [1, 0]
    assert result.logprobs == logprobs
    assert (result.num_drafted_tokens, result.num_accepted_tokens) == ([3, 0], [2, 0])
    assert result.row_failures[2].reason is FailureReason.NUMERICAL_ERROR
    assert result.failure is None
    assert result.wait_us == 250


def test_bytes_that_are_no_ids_break_the_contract() -> None:
    message = worker_pb2.StepResult(step=3, sampled_token_ids=b"abc")
    with pytest.raises(WorkerContractError, match="step 3: sampled_token_ids"):
        result_from_proto(message)


def test_every_limit_is_read() -> None:
    message = worker_pb2.WorkerCapacity(
        num_blocks=9, block_size_tokens=4, num_rows=4, max_num_seqs=2, max_num_batched_tokens=8,
        max_model_len=16, vocab_size=100, model_digest="ab", is_replay=True, version="1",
        num_speculative_tokens=3,
    )  # fmt: skip
    assert capacity_from_proto(message) == Capacity(
        num_blocks=9, block_size_tokens=4, num_rows=4, max_num_seqs=2, max_num_batched_tokens=8,
        max_model_len=16, vocab_size=100, model_digest="ab", is_replay=True, version="1",
        num_speculative_tokens=3,
    )  # fmt: skip


async def test_a_worker_that_used_up_the_epochs_breaks_the_contract(folder: str) -> None:
    server = await serve_worker(Odd(epoch=(1 << 64) - 1), f"unix:{folder}/w")  # type: ignore[arg-type]  # as a worker
    with pytest.raises(WorkerContractError, match="none is left"):
        await client(folder).open(1)
    await server.stop(0)


def test_a_tick_and_what_it_is_chosen_from_cross_the_border() -> None:
    tick = Tick(
        num_tokens=5, moe_method=2, num_draft_passes=3, num_draft_rows=4, captured_num_seqs=6
    )
    message = plan_to_proto(replace(PLAN, tick=tick)).tick
    assert (message.num_tokens, message.moe_method) == (5, worker_pb2.MOE_METHOD_ALLTOALL)
    assert (message.num_draft_passes, message.num_draft_rows) == (3, 4)
    assert message.captured_num_seqs == 6
    assert not plan_to_proto(PLAN).HasField("tick")
    bounds = [
        worker_pb2.MoeMethodBound(max_num_tokens=8, method=worker_pb2.MOE_METHOD_MC2),
        worker_pb2.MoeMethodBound(max_num_tokens=64, method=worker_pb2.MOE_METHOD_ALLGATHER),
    ]
    sizes = {
        "num_blocks": 9,
        "block_size_tokens": 4,
        "num_rows": 2,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 4,
        "max_model_len": 8,
    }
    found = capacity_from_proto(
        worker_pb2.WorkerCapacity(
            **sizes,
            data_parallel_size=2,
            data_parallel_rank=1,
            moe_methods=bounds,
            captured_num_seqs=[1, 4],
        )
    )
    assert (found.data_parallel_size, found.data_parallel_rank) == (2, 1)
    assert found.moe_methods == ((8, 3), (64, 1))
    assert found.captured_num_seqs == (1, 4)
    assert capacity_from_proto(worker_pb2.WorkerCapacity(**sizes)).data_parallel_size == 1
