"""Delivery of one stream's bytes, and the keeper that looks after all of them.

Frames go out as they came, nothing is encoded again. The keeper wakes up a few times a second: it
sends a comment line on streams that were silent for long, and cuts clients that take no bytes.
That costs nothing per frame.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.background import KeptAnswer
from services.frontend.detokenizers import Detokenizers
from services.frontend.errors import from_request_error
from services.frontend.exchange import Exchange
from services.frontend.framing import CHUNKS, Framing
from services.frontend.http_protocol import Connection, connection_of
from shared.errors import FailureReason, RequestError

TICK_S: Final = 0.25
# A stream that has failed waits only so long for its client to take the error.
FAILED_STALL_S: Final = 2.0
HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(slots=True, eq=False)
class Lane:
    """One stream on its way out; times are of the monotonic clock."""

    exchange: Exchange
    task: "asyncio.Task[object] | None"
    opened: float
    last_sent: float
    blocked_since: float | None = None
    has_output: bool = False
    num_events: int = 0
    is_silent: bool = False
    is_cut: bool = False
    connection: Connection | None = None
    num_unsent_bytes: int = 0

    def note_taken(self, now: float) -> None:
        """A client that is slow, but takes bytes, has all the time it needs."""
        if self.connection is not None and not self.exchange.error:
            num_unsent, before = self.connection.num_unsent_bytes, self.num_unsent_bytes
            self.num_unsent_bytes = num_unsent
            if num_unsent < before:
                self.blocked_since = now


class StreamKeeper:
    """Looks after the streams that are under way.

    Args:
        keep_alive_s: Silence before a comment line; 0 is off.
        stall_s: A client that takes no bytes for so long is cut off.
        max_s: A stream that has not ended by then fails, whatever the mesh says.
    """

    def __init__(self, *, keep_alive_s: float, stall_s: float, max_s: float) -> None:
        """Start with no streams."""
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._max_s = max_s
        self._lanes: set[Lane] = set()

    def open(self, exchange: Exchange) -> Lane:
        """Look after a stream that the current task delivers."""
        now = time.monotonic()
        lane = Lane(exchange, asyncio.current_task(), now, now)
        self._lanes.add(lane)
        return lane

    def close(self, lane: Lane) -> None:
        """The stream has ended."""
        self._lanes.discard(lane)

    async def run(self) -> None:
        """Look after the streams until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """One round over all streams."""
        for lane in self._lanes:
            if now - lane.opened > self._max_s:
                lane.exchange.fail(
                    RequestError(FailureReason.DEADLINE_EXCEEDED, "the request took too long")
                )
            if lane.blocked_since is not None:
                lane.note_taken(now)
                limit = FAILED_STALL_S if lane.exchange.error is not None else self._stall_s
                if now - lane.blocked_since > limit and lane.task is not None and not lane.is_cut:
                    lane.is_cut = True
                    lane.task.cancel()
            elif self._keep_alive_s and now - lane.last_sent >= self._keep_alive_s:
                lane.is_silent = True
                lane.exchange.wake()


class StreamAnswer(Response):
    """The response whose body are the frames of an exchange.

    Args:
        exchange: Admitted.
        detokenizers: Get the credit for bytes that left.
        keeper: Looks after the delivery.
        framing: Writes what the gateway itself has to say.
        kept: Gets the finished object, if it is kept.
        headers: Further response headers.
        on_first_bytes: Called once, when output has left for the first time.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        exchange: Exchange,
        *,
        detokenizers: Detokenizers,
        keeper: StreamKeeper,
        framing: Framing = CHUNKS,
        kept: KeptAnswer | None = None,
        headers: Mapping[str, str],
        on_first_bytes: Callable[[], None],
    ) -> None:
        """Prepare the head; there is no body yet, so the parent's constructor is not for us."""
        self.status_code = 200
        self.background = None
        self._exchange = exchange
        self._detokenizers = detokenizers
        self._keeper = keeper
        self._framing = framing
        self._kept = kept
        self._on_first_bytes = on_first_bytes
        self.init_headers({**HEADERS, **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head, frames and end."""
        lane = self._keeper.open(self._exchange)
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            self._open_sink(lane, connection_of(scope))
            await self._send_frames(lane, send)
            await self._send_end(lane, send)
        except asyncio.CancelledError:
            if not lane.is_cut:
                raise
            if (connection := connection_of(scope)) is not None:
                connection.drop()
            raise RequestError(
                FailureReason.SLOW_READER, "the client did not take its bytes in time"
            ) from None
        finally:
            self._exchange.sink = None
            self._keeper.close(lane)

    def _open_sink(self, lane: Lane, connection: Connection | None) -> None:
        """Let frames go to the connection from where they arrive, while nothing is in their way.

        That saves a turn of the event loop and all layers of ASGI: most of the cost of a frame.
        """
        lane.connection = connection
        if connection is None:
            return

        def sink(data: bytes) -> bool:
            if lane.blocked_since is not None or not connection.write(data):
                return False
            self._note_sent(lane, data)
            return True

        self._exchange.sink = sink

    def _note_sent(self, lane: Lane, data: bytes) -> None:
        lane.last_sent = time.monotonic()
        self._detokenizers.give_credit(self._exchange, len(data))
        if self._framing.counts_events:
            lane.num_events += data.count(b"\n\n")
        if not lane.has_output:
            lane.has_output = True
            self._on_first_bytes()

    async def _send_frames(self, lane: Lane, send: Send) -> None:
        exchange = self._exchange
        while True:
            await exchange.wait()
            data = exchange.take()
            if data:
                await _send(lane, send, data)
                self._note_sent(lane, data)
            elif exchange.is_ended:
                return
            elif lane.is_silent:
                await _send(lane, send, self._framing.keep_alive)

    async def _send_end(self, lane: Lane, send: Send) -> None:
        """A good end has had its last frame; a bad one gets its error from here."""
        error, tail = self._exchange.error, b""
        if error is not None:
            tail = self._framing.failure(from_request_error(error), lane.num_events)
        elif self._kept is not None and self._exchange.object_json:
            await self._kept.keep(self._exchange.object_json)
        await _send(lane, send, tail, is_last=True)


async def _send(lane: Lane, send: Send, data: bytes, *, is_last: bool = False) -> None:
    lane.blocked_since = time.monotonic()
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})
    lane.blocked_since = None
    lane.last_sent = time.monotonic()
    lane.is_silent = False
