"""The gRPC door of the worker: messages in, plans to the runner, results out.

One `RunSteps` stream is one epoch. The event loop reads, checks order and window, and writes; the
runner's thread works. Whatever ends the stream ends the epoch and frees every row.
"""

import asyncio
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio
import numpy as np

from protos.glm.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from services.worker.orders import EndEpoch, Epoch, LocalOrders, RunPlan, StartEpoch
from services.worker.parallel.moe_method import MoeMethod
from services.worker.plan import (
    Capacity,
    ContractError,
    Ids,
    Ints,
    LogprobColumns,
    NewSequence,
    StepPlan,
    StepResult,
    Tick,
)
from services.worker.prefill_spans import PrefillSpans
from services.worker.runner import Runner
from shared.admin import software_version
from shared.constraint import PrepareOrder
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.rpc import Server
from shared.sampling import SamplingSpec
from shared.wire import (
    check_columns,
    failure_to_proto,
    replay_from_proto,
    sampling_from_proto,
    unpack_ids,
)
from shared.wire_constraint import constraint_from_proto

if TYPE_CHECKING:  # a replay worker does without the engine
    from services.worker.grammar.desk import GrammarDesk

_log = get_logger(__name__)

SERVICE_NAME: str = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_METHODS = MappingProxyType(
    {
        MoeMethod.ALLGATHER: worker_pb2.MOE_METHOD_ALLGATHER,
        MoeMethod.ALLTOALL: worker_pb2.MOE_METHOD_ALLTOALL,
        MoeMethod.MC2: worker_pb2.MOE_METHOD_MC2,
    }
)
_METHODS_BY_NUMBER = MappingProxyType({number: method for method, number in _METHODS.items()})
_MAX_EPOCH_STEP = 1 << 20
_MAX_PLANS_IN_FLIGHT = 2

Context: TypeAlias = grpc.aio.ServicerContext


class _SupersededError(Exception):
    """Another scheduler opened a higher epoch."""


class _Session:
    """One open epoch on the event loop's side."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.loop = asyncio.get_running_loop()
        # Bounded by the window: the reader refuses a plan beyond it.
        self.results: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self.superseded = asyncio.Event()
        self.failure: RequestError | None = None
        """Why the worker itself ends it."""
        self.last_step = 0
        self.num_in_flight = 0
        self.is_half_closed = False

    def answer(self, result: StepResult) -> None:
        """Take a result from the runner's thread."""
        if self.loop.is_closed():
            return  # the process is ending, and the stream has ended before it
        self.loop.call_soon_threadsafe(self.results.put_nowait, result)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves `WorkerService`; at most one epoch stands."""

    def __init__(
        self,
        runner: Runner,
        orders: LocalOrders,
        spans: PrefillSpans,
        grammars: "GrammarDesk | None" = None,
    ) -> None:
        self._runner = runner
        self._grammars = grammars
        self._orders = orders
        self._spans = spans
        self._session: _Session | None = None
        self._highest_epoch = 0
        self._is_draining = False
        self._failure: RequestError | None = None
        self._version = software_version()

    def add_to(self, server: Server) -> None:
        """Answer on `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    @property
    def is_draining(self) -> bool:
        """Whether new epochs are refused."""
        return self._is_draining

    def drain(self) -> None:
        """Refuse new epochs; the present one goes on."""
        self._is_draining = True

    def fail(self, error: RequestError) -> None:
        """No step can be run any more: end the present epoch, refuse others."""
        self._failure = error
        if self._session is not None:
            self._session.failure = error
            self._session.superseded.set()

    async def GetCapacity(
        self, request: worker_pb2.GetCapacityRequest, context: Context
    ) -> worker_pb2.GetCapacityResponse:
        """Tell limits and the highest epoch seen."""
        capacity = await self._capacity(context)
        return worker_pb2.GetCapacityResponse(capacity=capacity, epoch=self._highest_epoch)

    async def PrepareSequence(
        self, request: worker_pb2.PrepareSequenceRequest, context: Context
    ) -> worker_pb2.PrepareSequenceResponse:
        """Get a constraint ready; the error that refuses it says why."""
        if self._grammars is None:
            raise RequestError(
                FailureReason.FEATURE_DISABLED,
                "constraint: this worker replays scripts and constrains nothing",
                field="constraint",
            )
        order = PrepareOrder(
            constraint=constraint_from_proto(request.constraint),
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            traceparent=request.traceparent,
        )
        took_us = await self._grammars.prepare(order)
        return worker_pb2.PrepareSequenceResponse(prepare_us=took_us)

    async def RunSteps(self, request_iterator: object, context: Context) -> None:
        """Run one epoch until its scheduler goes, breaks the contract or is replaced."""
        capacity = await self._capacity(context)
        first = await context.read()
        if first is grpc.aio.EOF:
            return
        if first.WhichOneof("message") != "open":
            raise ContractError("the first message must open an epoch")
        session = await self._open(first.open, context)
        try:
            opened = worker_pb2.EpochOpened(epoch=session.epoch.number, capacity=capacity)
            await context.write(worker_pb2.RunStepsResponse(opened=opened))
            await self._run_session(session, context)
        except _SupersededError:
            await context.abort(grpc.StatusCode.ABORTED, "a higher epoch was opened")
        finally:
            self._close(session)

    async def _capacity(self, context: Context) -> worker_pb2.WorkerCapacity:
        ready = self._runner.ready
        if not ready.done() or ready.exception() is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")
        return capacity_to_proto(ready.result(), self._version)

    async def _open(self, request: worker_pb2.OpenEpoch, context: Context) -> _Session:
        window = request.max_plans_in_flight
        if not 1 <= window <= _MAX_PLANS_IN_FLIGHT:
            raise ContractError(f"max_plans_in_flight {window} is not 1 or 2")
        if request.epoch > self._highest_epoch + _MAX_EPOCH_STEP:
            # Believed, it would use up the numbers that later schedulers need.
            raise ContractError(f"epoch {request.epoch} is far above {self._highest_epoch}")
        if request.epoch <= self._highest_epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {request.epoch} is not above {self._highest_epoch}",
            )
        if self._failure is not None:
            raise self._failure
        if self._is_draining:
            raise RequestError(FailureReason.DRAINING, "the worker is draining")
        if self._session is not None:
            self._session.epoch.is_over = True
            self._session.superseded.set()
        self._highest_epoch = request.epoch
        session = _Session(Epoch(request.epoch, window))
        self._session = session
        self._spans.clear()
        opened: asyncio.Future[None] = session.loop.create_future()

        def tell() -> None:
            session.loop.call_soon_threadsafe(_set_done, opened)

        try:
            self._orders.put(StartEpoch(epoch=session.epoch, opened=tell))
            await opened
        except asyncio.CancelledError:
            self._close(session)
            raise
        _log.info(
            "epoch opened",
            extra={"epoch": request.epoch, "scheduler_id": request.scheduler_id, "window": window},
        )
        return session

    def _close(self, session: _Session) -> None:
        session.epoch.is_over = True
        self._orders.put(EndEpoch(epoch=session.epoch))
        if self._session is session:
            self._session = None
            self._spans.clear()
        _log.info("epoch ended", extra={"epoch": session.epoch.number, "step": session.last_step})

    async def _run_session(self, session: _Session, context: Context) -> None:
        """Read and write until the scheduler is done; raises whatever else ends the epoch."""
        writer = asyncio.ensure_future(self._write_results(session, context))
        watcher = asyncio.ensure_future(session.superseded.wait())
        reader = asyncio.ensure_future(self._read_plans(session, context))
        tasks = {reader, writer, watcher}
        waiting = set(tasks)
        try:
            while not writer.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if watcher.done():
                    raise session.failure or _SupersededError
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_plans(self, session: _Session, context: Context) -> None:
        """Give plans to the runner until the scheduler closes its side."""
        while (message := await context.read()) is not grpc.aio.EOF:
            if message.WhichOneof("message") != "plan":
                raise ContractError("only plans may follow the opening of an epoch")
            plan = plan_from_proto(message.plan)
            if plan.step != session.last_step + 1:
                raise ContractError(f"step {plan.step} follows step {session.last_step}")
            if session.num_in_flight >= session.epoch.max_plans_in_flight:
                raise ContractError(f"step {plan.step} exceeds the plans in flight")
            session.last_step = plan.step
            session.num_in_flight += 1
            self._spans.see_plan(plan)
            for new in plan.new_sequences:
                _log.debug("row taken", extra={"request_id": new.request_id, "row": new.row})
            encode = message.plan.SerializeToString  # for other ranks, if there are any
            self._orders.put(
                RunPlan(epoch=session.epoch, plan=plan, answer=session.answer, encode=encode)
            )
        session.is_half_closed = True
        if not session.num_in_flight:
            session.results.put_nowait(None)

    async def _write_results(self, session: _Session, context: Context) -> None:
        """Send results as they come until none can follow; a failed step raises its error."""
        while (result := await session.results.get()) is not None:
            self._spans.see_result(result)
            message = worker_pb2.RunStepsResponse(result=result_to_proto(result))
            # Before the write: the next plan may be here while the write is still returning.
            session.num_in_flight -= 1
            await context.write(message)
            if result.failure is not None:
                raise result.failure
            if session.is_half_closed and not session.num_in_flight:
                return


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def capacity_to_proto(capacity: Capacity, software: str) -> worker_pb2.WorkerCapacity:
    """Limits as their message."""
    return worker_pb2.WorkerCapacity(
        num_blocks=capacity.num_blocks,
        block_size_tokens=capacity.block_size,
        num_rows=capacity.num_rows,
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        max_model_len=capacity.max_model_len,
        vocab_size=capacity.vocab_size,
        model_digest=capacity.model_digest,
        is_replay=capacity.is_replay,
        version=software,
        block_size_bytes=capacity.block_size_bytes,
        num_speculative_tokens=capacity.num_speculative_tokens,
        data_parallel_size=capacity.data_parallel_size,
        data_parallel_rank=capacity.data_parallel_rank,
        moe_methods=[
            worker_pb2.MoeMethodBound(max_num_tokens=most, method=_METHODS[method])
            for most, method in capacity.moe_ladder
        ],
        captured_num_seqs=capacity.captured_num_seqs,
    )


def read_plan(data: bytes) -> StepPlan:
    """A plan as it travels from a leader to the other ranks; it has been checked there."""
    return plan_from_proto(worker_pb2.StepPlan.FromString(data))


def plan_from_proto(message: worker_pb2.StepPlan) -> StepPlan:
    """A message as a plan; ContractError if its columns do not fit together."""
    try:
        check_columns(
            len(message.rows),
            num_scheduled_tokens=message.num_scheduled_tokens,
            num_computed_tokens=message.num_computed_tokens,
            num_new_blocks=message.num_new_blocks,
        )
        return StepPlan(
            step=message.step,
            rows=_ints(message.rows),
            num_scheduled_tokens=_ints(message.num_scheduled_tokens),
            num_computed_tokens=_ints(message.num_computed_tokens),
            num_new_blocks=_ints(message.num_new_blocks),
            new_blocks=_ids(message.new_blocks, "new_blocks"),
            new_sequences=tuple(map(_sequence_from_proto, message.new_sequences)),
            freed_rows=tuple(message.freed_rows),
            tick=_tick_from_proto(message.tick) if message.HasField("tick") else None,
        )
    except RequestError as error:
        raise ContractError(error.message) from None


def _tick_from_proto(message: worker_pb2.Tick) -> Tick:
    method = _METHODS_BY_NUMBER.get(message.moe_method)
    if method is None:
        raise ContractError(f"moe_method {message.moe_method} of the tick is not known")
    if message.num_tokens < 1:
        raise ContractError("num_tokens of the tick must be at least 1")
    if message.num_draft_passes > 1 and message.num_draft_rows < 1:
        raise ContractError("num_draft_rows of the tick must be at least 1 for later passes")
    return Tick(
        num_tokens=message.num_tokens,
        method=method,
        num_draft_passes=message.num_draft_passes,
        num_draft_rows=message.num_draft_rows,
        captured_num_seqs=message.captured_num_seqs,
    )


def _sequence_from_proto(message: worker_pb2.NewSequence) -> NewSequence:
    error: RequestError | None = None
    sampling = SamplingSpec()
    replay = None
    prompt = output = np.empty(0, np.uint32)
    try:
        sampling = sampling_from_proto(message.sampling)
        prompt = _ids(message.prompt_token_ids, "prompt_token_ids")
        output = _ids(message.output_token_ids, "output_token_ids")
        replay = replay_from_proto(message.replay) if message.HasField("replay") else None
    except RequestError as caught:
        error = caught
    return NewSequence(
        row=message.row,
        request_id=message.request_id,
        prompt_token_ids=prompt,
        output_token_ids=output,
        num_computed_tokens=message.num_computed_tokens,
        sampling=sampling,
        replay=replay,
        traceparent=message.traceparent,
        error=error,
    )


def result_to_proto(result: StepResult) -> worker_pb2.StepResult:
    """A result as its message."""
    timings = result.timings
    return worker_pb2.StepResult(
        step=result.step,
        rows=result.rows.tolist(),
        num_computed_tokens=result.num_computed_tokens.tolist(),
        num_sampled_tokens=result.num_sampled_tokens.tolist(),
        sampled_token_ids=result.sampled_token_ids.astype("<u4").tobytes(),
        finish_codes=result.finish_codes.tolist(),
        logprobs=None if result.logprobs is None else _logprobs_to_proto(result.logprobs),
        row_failures=[
            worker_pb2.RowFailure(row=entry.row, failure=failure_to_proto(entry.error))
            for entry in result.row_failures
        ],
        failure=None if result.failure is None else failure_to_proto(result.failure),
        timings=worker_pb2.StepTimings(
            wait_us=timings.wait_us,
            prepare_us=timings.prepare_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
            draft_us=timings.draft_us,
            mask_us=timings.mask_us,
            num_masks=timings.num_masks,
        ),
        num_drafted_tokens=result.num_drafted_tokens.tolist(),
        num_accepted_tokens=result.num_accepted_tokens.tolist(),
        prompt_logprobs=[
            worker_pb2.RowPromptLogprobs(
                row=entry.row, start=entry.start, logprobs=_logprobs_to_proto(entry.logprobs)
            )
            for entry in result.prompt_logprobs
        ],
    )


def _logprobs_to_proto(columns: LogprobColumns) -> common_pb2.LogprobColumns:
    return common_pb2.LogprobColumns(
        sampled_logprobs=columns.sampled_logprobs.astype("<f4").tobytes(),
        sampled_ranks=columns.sampled_ranks.astype("<u4").tobytes(),
        num_top_logprobs=columns.num_top_logprobs.tolist(),
        top_token_ids=columns.top_token_ids.astype("<u4").tobytes(),
        top_logprobs=columns.top_logprobs.astype("<f4").tobytes(),
    )


def _ints(column: Sequence[int]) -> Ints:
    return np.fromiter(column, np.int64, len(column))


def _ids(data: bytes, field: str) -> Ids:
    return np.frombuffer(unpack_ids(data, field), np.uint32)
