"""Submissions whose constraint the workers get ready, before the core knows of them.

Laws
- A constrained submission reaches the core once every worker that takes plans is ready for it, but
  for those that have no place for it or are much slower than the first: one that is frozen holds
  nobody up, and gets ready within its step if the submission comes there. A worker that comes
  (back) is made ready for all that lived then before it takes plans.
- Each of its sequences gets one verdict: that of the core, the refusal of a worker, or what ended
  it before. The order of verdicts follows readiness, not submission.
- Nothing here outlives its client, its time limit or the process.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from services.scheduler.messages import Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import WorkerLostError
from shared.constraint import PrepareOrder
from shared.errors import FailureReason, RequestError
from shared.tasks import hear

MAX_PREPARING: Final = 1024
# After the first worker is ready: all compile the same, so one that takes longer is stuck, or has a
# queue of its own.
STRAGGLER_S: Final = 1.0


class Preparer(Protocol):
    """A worker that takes plans, or will once it is ready."""

    async def prepare(self, order: PrepareOrder) -> int:
        """Get a constraint ready; microseconds that it took.

        Raises:
            RequestError: It cannot be used.
            WorkerLostError: The worker cannot be asked.
        """
        ...


@dataclasses.dataclass(slots=True, eq=False)
class _Pending:
    """A submission on its way."""

    submission: Submission
    outlet: Outlet
    task: "asyncio.Task[None]"


Admit = Callable[[Submission, Outlet], list[Verdict]]
Tell = Callable[[Outlet, list[Verdict]], None]


class Preparations:
    """All that are on their way. One event loop uses it.

    Args:
        admit: Submits to the core.
        tell: Brings verdicts to a client.
        max_timeout_s: Bounds the time on the way, beside the limit of the request itself.
    """

    def __init__(self, admit: Admit, tell: Tell, max_timeout_s: float) -> None:
        """Nothing is on its way, no worker is known."""
        self._admit = admit
        self._tell = tell
        self._max_timeout_s = max_timeout_s
        self._pending: dict[str, _Pending] = {}
        self._workers: dict[Preparer, None] = {}
        self.num_prepared = 0
        self.prepare_us = 0

    def __len__(self) -> int:
        return sum(len(p.submission.sequences) for p in self._pending.values())

    # -- workers -----------------------------------------------------------------------------

    async def add_worker(
        self, worker: Preparer, live: Iterable[PrepareOrder]
    ) -> dict[str, RequestError]:
        """Make a worker ready for live requests; those that it refuses by their ids, and why.

        One that it has no place for now gets ready within its step, if it comes there.

        Raises:
            WorkerLostError: It cannot be asked.
        """
        self._workers[worker] = None  # what comes from now on is prepared there as well
        wanted = [*live, *(_order(pending.submission) for pending in self._pending.values())]
        refused: dict[str, RequestError] = {}
        for order in wanted:
            try:
                await worker.prepare(dataclasses.replace(order, traceparent=""))
            except RequestError as error:
                if error.retry_after_ms is None:
                    refused[order.request_id] = error
        return refused

    def remove_worker(self, worker: Preparer) -> None:
        """A worker takes no more plans."""
        self._workers.pop(worker, None)

    # -- clients -----------------------------------------------------------------------------

    def start(self, submission: Submission, outlet: Outlet) -> None:
        """Take a submission whose sequences get their verdicts later.

        Raises:
            RequestError: Its id is taken, or too many are on their way.
        """
        request_id = submission.request_id
        if request_id in self._pending:
            raise RequestError(
                FailureReason.ALREADY_EXISTS, f"request {request_id} is live", field="request_id"
            )
        if len(self._pending) >= MAX_PREPARING:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                f"{MAX_PREPARING} requests wait for their constraints",
                retry_after_ms=1000,
            )
        for sequence in submission.sequences:
            outlet.preparing[sequence.stream_id] = request_id
        task = asyncio.get_running_loop().create_task(self._run(request_id))
        self._pending[request_id] = _Pending(submission, outlet, task)

    def abort(self, outlet: Outlet, stream_id: int, error: RequestError) -> bool:
        """End one sequence; whether it was on its way."""
        request_id = outlet.preparing.pop(stream_id, None)
        if request_id is None:
            return False
        pending = self._pending[request_id]
        left = tuple(s for s in pending.submission.sequences if s.stream_id != stream_id)
        self._tell(outlet, [Verdict(stream_id=stream_id, refusal=error)])
        if left:
            pending.submission = dataclasses.replace(pending.submission, sequences=left)
        else:
            self._drop(request_id)
        return True

    def abort_request(self, request_id: str, error: RequestError) -> int:
        """End a request by its id; how many of its sequences were on their way."""
        pending = self._pending.get(request_id)
        if pending is None:
            return 0
        count = len(pending.submission.sequences)
        self._refuse(request_id, error)
        return count

    def close_outlet(self, outlet: Outlet) -> None:
        """The client is gone: nobody is told."""
        for request_id in set(outlet.preparing.values()):
            self._drop(request_id)

    def fail_all(self, error: RequestError) -> None:
        """End everything."""
        for request_id in list(self._pending):
            self._refuse(request_id, error)

    async def close(self) -> None:
        """The loop ends: nobody is told."""
        tasks = [pending.task for pending in self._pending.values()]
        for request_id in list(self._pending):
            self._drop(request_id)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inside ------------------------------------------------------------------------------

    async def _run(self, request_id: str) -> None:
        started = time.monotonic()
        submission = self._pending[request_id].submission
        limit_s = min(submission.timeout_ms / 1000 or self._max_timeout_s, self._max_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                await self._prepare_everywhere(submission)
        except RequestError as error:
            self._refuse(request_id, error)
            return
        except TimeoutError:
            text = f"the time limit is over after {limit_s * 1000:.0f} ms"
            self._refuse(request_id, RequestError(FailureReason.DEADLINE_EXCEEDED, text))
            return
        pending = self._forget(request_id)
        submission = pending.submission
        if submission.timeout_ms:
            spent_ms = round((time.monotonic() - started) * 1000)
            left_ms = max(1, submission.timeout_ms - spent_ms)
            submission = dataclasses.replace(submission, timeout_ms=left_ms)
        self.num_prepared += 1
        self._tell(pending.outlet, self._admit(submission, pending.outlet))

    async def _prepare_everywhere(self, submission: Submission) -> None:
        """Ask every worker; one that is lost meanwhile is made ready when it comes back.

        Raises:
            RequestError: One of them refuses it, or none has a place for it now.
        """
        order = _order(submission)
        waiting = {asyncio.ensure_future(worker.prepare(order)) for worker in self._workers}
        for call in waiting:
            call.add_done_callback(hear)
        limit: float | None = None
        full: RequestError | None = None
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting,
                    timeout=None if limit is None else max(0.0, limit - time.monotonic()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    return
                is_ready, error = self._note(done)
                full = full or error
                if is_ready and limit is None:
                    limit = time.monotonic() + STRAGGLER_S
        finally:
            for call in waiting:
                call.cancel()
        if full is not None and limit is None:
            raise full

    def _note(self, done: "Iterable[asyncio.Future[int]]") -> tuple[bool, RequestError | None]:
        """Whether one of these workers is ready, and why another is not for now.

        Raises:
            RequestError: The constraint cannot be used.
        """
        is_ready, full = False, None
        for call in done:
            try:
                self.prepare_us += call.result()
                is_ready = True
            except WorkerLostError:
                continue
            except RequestError as error:
                if error.retry_after_ms is None:
                    raise
                full = error
        return is_ready, full

    def _refuse(self, request_id: str, error: RequestError) -> None:
        pending = self._drop(request_id)
        self._tell(pending.outlet, _refusals(pending.submission, error))

    def _drop(self, request_id: str) -> _Pending:
        pending = self._forget(request_id)
        if pending.task is not asyncio.current_task():
            pending.task.cancel()
        return pending

    def _forget(self, request_id: str) -> _Pending:
        pending = self._pending.pop(request_id)
        for sequence in pending.submission.sequences:
            pending.outlet.preparing.pop(sequence.stream_id, None)
        return pending


def _order(submission: Submission) -> PrepareOrder:
    constraint = submission.sampling.constraint
    assert constraint is not None
    return PrepareOrder(
        constraint=constraint,
        request_id=submission.request_id,
        tenant_id=submission.tenant_id,
        traceparent=submission.traceparent,
    )


def aborted() -> RequestError:
    """What ends a sequence whose client or operator asked for it."""
    return RequestError(FailureReason.CANCELLED, "aborted")


def _refusals(submission: Submission, error: RequestError) -> list[Verdict]:
    return [Verdict(stream_id=s.stream_id, refusal=error) for s in submission.sequences]
