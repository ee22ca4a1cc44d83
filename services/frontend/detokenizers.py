"""All detokenizers behind this gateway: who gets a request, and what happens when one is lost.

    submitted --lost, or refused by one that others can replace--> submitted elsewhere, or waiting
    waiting --one is ready--> submitted        waiting --the time is over--> failed

Law: a request is with one detokenizer at a time; it moves only as long as none of its bytes has
left for the client, so no answer begins twice. It goes to the ready one with the least in flight.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from services.frontend.counted_load import CountedLoad
from services.frontend.detokenizer_client import DetokenizerClient
from services.frontend.exchange import Exchange
from services.frontend.resubmission import (
    FIRST_TOKEN_FIELD,
    LOOK_S,
    MAX_LOSSES,
    Job,
    Limits,
    ResubmitBounds,
    in_time,
    packed,
)
from services.frontend.submission import Submission
from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.sampling import LoadSnapshot

# Refusals that speak of the detokenizer or its chain, not of the request.
_ELSEWHERE: Final = frozenset({FailureReason.DRAINING, FailureReason.UPSTREAM_LOST})
# Those that may be over in a moment, for a request that had been taken already.
_PASSING: Final = _ELSEWHERE | {FailureReason.QUEUE_FULL}

# Detokenizers end what is late themselves; the gateway does where they do not.
LIMIT_GRACE_S: Final = 0.5

_logger = get_logger(__name__)
_Job: TypeAlias = Job[DetokenizerClient]


class Detokenizers:
    """Submits each request to one detokenizer, and to another when that one is lost.

    Args:
        addresses: Where they listen.
        credit_bytes: Bytes of a stream that may be under way.
        bounds: Of second tries.
        silence_s: One that says nothing for so long is lost.
        on_resubmit: Told why (`lost` or `refused`) a request is submitted again.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        credit_bytes: int,
        bounds: ResubmitBounds,
        silence_s: float = 5.0,
        on_resubmit: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start disconnected; `run` connects."""
        self._bounds = bounds
        self._silence_s = silence_s
        self._on_resubmit = on_resubmit
        self.clients = tuple(
            DetokenizerClient(
                address,
                credit_bytes=credit_bytes,
                on_change=self._look_at_waiting,
                on_lost=self._take_loss,
                on_refused=self._take_refusal,
                on_failed=self._take_failure,
                on_load=partial(self._take_load, number),
            )
            for number, address in enumerate(addresses)
        )
        self._counted = CountedLoad(len(self.clients), self._rank)
        # Gateways that start together must not send their first requests to the same one.
        self._turn = random.randrange(len(self.clients))
        self._jobs: dict[Exchange, _Job] = {}
        self._waiting: dict[Exchange, None] = {}
        self.num_kept_bytes = 0

    @property
    def is_connected(self) -> bool:
        """Whether one is reached."""
        return any(client.is_connected for client in self.clients)

    @property
    def is_draining(self) -> bool:
        """Whether those that are reached take no new requests."""
        return all(client.is_draining for client in self.clients if client.is_connected)

    @property
    def num_ready(self) -> int:
        """How many take new requests."""
        return sum(client.is_ready for client in self.clients)

    @property
    def num_open(self) -> int:
        """Requests whose end has not come."""
        return sum(client.num_open for client in self.clients) + len(self._waiting)

    @property
    def load(self) -> LoadSnapshot:
        """What is known of the schedulers, by the first detokenizer whose chain serves.

        All that serve say the same within a tenth of a second; counters are this gateway's.
        """
        return self._counted.shown(self._first_load)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output that the schedulers take; 0 while nobody told."""
        return self._first_load.max_model_len

    @property
    def _first_load(self) -> LoadSnapshot:
        for client in self.clients:
            if client.load.is_worker_ready:
                return client.load
        return max(self.clients, key=lambda client: client.load_at).load

    def _take_load(self, number: int, load: LoadSnapshot) -> None:
        self._counted.take(number, load)

    def _rank(self, number: int) -> int:
        client = self.clients[number]
        return client.is_connected + client.is_ready

    async def run(self) -> None:
        """Keep connected until cancelled."""
        await asyncio.gather(*(client.run() for client in self.clients), self._watch())

    async def _watch(self) -> None:
        """Break connections to those that stand still: they hold up what others could do."""
        while True:
            await asyncio.sleep(LOOK_S)
            for client in self.clients:
                if client.look() * LOOK_S >= self._silence_s:
                    _logger.warning("a detokenizer says nothing, cut off")
                    client.drop()
            self._look_at_limits()

    def submit(self, submission: Submission) -> Exchange:
        """Send a request; raises UPSTREAM_LOST when no detokenizer is reached."""
        client = self._choose() or self._any_connected()
        small = packed(submission)
        exchange = client.submit(small)
        room = self._bounds.max_bytes - self.num_kept_bytes
        is_kept = self._bounds.timeout_s > 0 and exchange.num_bytes <= room
        kept, num_bytes = (small, exchange.num_bytes) if is_kept else (None, 0)
        self.num_kept_bytes += num_bytes
        self._jobs[exchange] = Job(client, kept, num_bytes, time.monotonic(), Limits.of(submission))
        return exchange

    def close(self, exchange: Exchange) -> None:
        """Give a request up; aborts it if its end has not come. Idempotent."""
        job = self._jobs.pop(exchange, None)
        if job is not None:
            self._stop_waiting(exchange, job)
            self._let_go(job)
            job.client.close(exchange)

    def give_credit(self, exchange: Exchange, num_bytes: int) -> None:
        """Say that bytes of a stream have left for its client."""
        job = self._jobs.get(exchange)
        if job is not None and num_bytes:
            self._let_go(job)
            job.client.give_credit(exchange, num_bytes)

    def fail_all(self, error: RequestError) -> None:
        """End what is open with `error`; its handlers tell their clients and abort it."""
        for exchange in self._jobs:
            exchange.fail(error)

    async def abort(self, request_id: str) -> int:
        """End a request by its id, wherever it is; how many were found.

        It may be another gateway's, so every detokenizer is asked.
        """
        waiting = [exchange for exchange in self._waiting if exchange.request_id == request_id]
        for exchange in waiting:
            exchange.fail(RequestError(FailureReason.CANCELLED, "the request was aborted"))
        asked = [client for client in self.clients if client.is_connected]
        answers = await asyncio.gather(
            *(client.abort(request_id) for client in asked or self.clients[:1]),
            return_exceptions=True,
        )
        num_found = len(waiting) + sum(answer for answer in answers if isinstance(answer, int))
        for answer in answers:
            if isinstance(answer, BaseException) and not num_found:
                raise answer
        return num_found

    async def reset_cache(self) -> int:
        """Let no later request share what was computed so far; how many blocks that were."""
        for client in self.clients:
            if client.is_ready:
                with contextlib.suppress(RequestError):
                    return await client.reset_cache()
        return await self._any_connected().reset_cache()

    # -- who gets a request -------------------------------------------------------------------

    def _choose(self, refused_by: Sequence[DetokenizerClient] = ()) -> DetokenizerClient | None:
        """The ready one with the least in flight; turns decide between equals.

        The counts are this gateway's own and exact, and detokenizers are few: to look at two at
        random would only be worse than to look at all.
        """
        self._turn = (self._turn + 1) % len(self.clients)
        turns = self.clients[self._turn :] + self.clients[: self._turn]
        ready = [client for client in turns if client.is_ready and client not in refused_by]
        return min(ready, key=lambda client: client.num_sequences, default=None)

    def _any_connected(self) -> DetokenizerClient:
        """One that says why nothing is served, where none is ready."""
        connected = [client for client in self.clients if client.is_connected]
        return min(connected or self.clients, key=lambda client: client.is_draining)

    # -- what happens when one is lost --------------------------------------------------------

    def _take_loss(self, exchange: Exchange, error: RequestError) -> None:
        job = self._jobs.get(exchange)
        if job is None or not job.may_move(exchange) or job.num_losses >= MAX_LOSSES:
            exchange.fail(error)
            return
        job.num_losses += 1
        job.refused_by = ()
        job.give_up_at = time.monotonic() + self._bounds.timeout_s
        self._move(exchange, job, error, "lost")

    def _take_refusal(self, exchange: Exchange, error: RequestError) -> None:
        job = self._jobs.get(exchange)
        if job is None or not job.may_move(exchange):
            exchange.fail(error)
            return
        job.refused_by = (*job.refused_by, job.client)
        if error.reason in _ELSEWHERE and self._choose(job.refused_by) is not None:
            self._move(exchange, job, error, "refused")
        elif error.reason in _PASSING and job.num_losses:
            # It had been taken before: a mesh that recovers is worth a wait.
            job.refused_by, job.is_paused = (), True
            self._wait(exchange, job, error)
        else:
            self._take_failure(exchange, error)

    def _take_failure(self, exchange: Exchange, error: RequestError) -> None:
        """A bad end; after a move its detokenizer knew only what was left of the limits."""
        job = self._jobs.get(exchange)
        if job is not None and job.has_moved and error.reason is FailureReason.DEADLINE_EXCEEDED:
            error = job.limits.error(is_first=error.field == FIRST_TOKEN_FIELD)
        exchange.fail(error)

    def _look_at_limits(self) -> None:
        """End what nobody answers in time: a detokenizer that stands still does not.

        Of a request that was admitted nobody here knows whether its first token has come.
        """
        now = time.monotonic()
        for exchange, job in list(self._jobs.items()):
            passed_s = now - job.started - LIMIT_GRACE_S
            error = job.limits.error_at(passed_s, has_first_token=exchange.is_admitted)
            if error is not None and not exchange.is_ended:
                self._stop_waiting(exchange, job)
                exchange.fail(error)

    def _move(self, exchange: Exchange, job: _Job, error: RequestError, why: str) -> None:
        attempt = job.begin_move(exchange, why)
        ids = {"request_id": exchange.request_id, "attempt": attempt}
        _logger.warning("submitted again: %s", why, extra=ids)
        self._on_resubmit(why)
        job.error = error
        self._look(exchange, job)

    def _wait(self, exchange: Exchange, job: _Job, error: RequestError) -> None:
        job.error = error
        self._waiting[exchange] = None
        job.look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again, exchange)

    def _look_at_waiting(self) -> None:
        """A detokenizer may have become ready."""
        for exchange in list(self._waiting):
            job = self._jobs[exchange]
            if not job.is_paused:
                self._look(exchange, job)

    def _look_again(self, exchange: Exchange) -> None:
        job = self._jobs[exchange]
        job.is_paused = False
        self._look(exchange, job)

    def _look(self, exchange: Exchange, job: _Job) -> None:
        """Submit a request that has no detokenizer, or let it wait on while it has time."""
        assert job.error is not None
        assert job.submission is not None
        client = self._choose(job.refused_by)
        now = time.monotonic()
        late = job.limits.error_at(now - job.started, has_first_token=False)
        if exchange.is_ended:
            self._stop_waiting(exchange, job)
        elif late is not None:  # also where nobody is there to take it
            self._stop_waiting(exchange, job)
            exchange.fail(late)
        elif client is not None:
            self._stop_waiting(exchange, job, is_placed=True)
            try:
                client.submit(in_time(job.submission, now - job.started), exchange)
                job.client = client
            except RequestError as error:
                exchange.fail(error)
        elif now < job.give_up_at:
            if job.look is not None:
                job.look.cancel()
            self._wait(exchange, job, job.error)
        else:
            self._stop_waiting(exchange, job)
            exchange.fail(job.error)

    def _stop_waiting(self, exchange: Exchange, job: _Job, *, is_placed: bool = False) -> None:
        self._waiting.pop(exchange, None)
        job.end_wait(is_placed=is_placed)

    def _let_go(self, job: _Job) -> None:
        """The request is not submitted again."""
        self.num_kept_bytes -= job.num_kept_bytes
        job.submission, job.num_kept_bytes = None, 0
