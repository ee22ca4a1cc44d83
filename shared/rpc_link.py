"""The client's side of a `Connect` stream: one per pair of processes, kept up for their lives.

Whatever is ready goes out in one message; a message that comes in is handed out without a pause.
When the stream breaks its owner is told once, nothing of it is sent on the next one, and the link
connects again by itself. Every stream has its own channel: a peer that comes back is reached at
once, not after a back-off that grew while it was away. A stream is up once the peer has said
something, which both contracts bid it do within about a second: what only takes connections is no
such peer, and one that is up for moments only is tried less and less often.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from shared.errors import FailureReason, RequestError
from shared.log import get_logger
from shared.rpc import CONNECT_TIMEOUT_MS, is_task_cancelled, open_channel

RECONNECT_MIN_S: Final = 0.1
RECONNECT_MAX_S: Final = 2.0
# A peer of the contract says something soon; a busy one may take a while.
FIRST_MESSAGE_S: Final = 5.0
# The same trouble is told again after so long.
SAME_TROUBLE_S: Final = 60.0
RETRY_AFTER_MS: Final = 1000
_ID_LIMIT: Final = 1 << 32

_logger = get_logger(__name__)


class Sized(Protocol):
    """A message that knows how many bytes it takes."""

    def ByteSize(self) -> int:  # protobuf's name
        """Serialized size."""


MessageT = TypeVar("MessageT", bound=Sized)


class LinkOwner(Protocol):
    """Who sends and receives on the link."""

    def next_message(self) -> Any | None:  # noqa: ANN401  # each contract has its own type
        """What is ready to be sent, None when nothing is."""

    def take_message(self, message: Any) -> None:  # noqa: ANN401  # as above
        """Hand out what came in; `RequestError` or ValueError when it breaks the contract."""

    def connection_changed(self, is_connected: bool) -> None:
        """The stream is up, or lost: then everything on it has failed."""


class ConnectLink:
    """Keeps one stream to `peer` up.

    Args:
        address: Where the peer listens.
        peer: Its name in logs and errors.
        open_call: Starts the stream on a channel.
        owner: Sends and receives.
        max_receive_mib: Largest message taken.
    """

    def __init__(
        self,
        address: str,
        *,
        peer: str,
        open_call: Callable[[grpc.aio.Channel], grpc.aio.StreamStreamCall],
        owner: LinkOwner,
        max_receive_mib: int = 16,
    ) -> None:
        """Start disconnected; `run` connects."""
        self._address = address
        self._peer = peer
        self._open_call = open_call
        self._owner = owner
        self._max_receive_mib = max_receive_mib
        self._outgoing = asyncio.Event()
        # Of the stream that is up, for unary calls beside it.
        self.channel: grpc.aio.Channel | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._trouble, self._told_at = "", 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the stream is up."""
        return self.channel is not None

    def wake(self) -> None:
        """Something is ready to be sent."""
        self._outgoing.set()

    def drop(self) -> None:
        """Break the stream, if one is up; then try again."""
        if self._call is not None:
            self._call.cancel()

    def check_connected(self) -> None:
        """Raise UPSTREAM_LOST when nothing can be sent."""
        if self.channel is None:
            raise RequestError(
                FailureReason.UPSTREAM_LOST,
                f"the {self._peer} cannot be reached",
                retry_after_ms=RETRY_AFTER_MS,
            )

    def lost_error(self) -> RequestError:
        """How requests fail that were on a lost stream."""
        return RequestError(
            FailureReason.UPSTREAM_LOST,
            f"the connection to the {self._peer} was lost",
            retry_after_ms=RETRY_AFTER_MS,
        )

    async def run(self) -> None:
        """Keep connected until cancelled."""
        pause_s = RECONNECT_MIN_S
        while True:
            # A try before the socket exists would start gRPC's own back-off, which grows.
            if not _may_answer(self._address) or await self._serve_one_stream():
                pause_s = RECONNECT_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RECONNECT_MAX_S)

    async def _serve_one_stream(self) -> bool:
        """One stream from connecting to its loss; whether it was up for a while."""
        began_at = time.monotonic()
        async with open_channel(self._address, max_receive_mib=self._max_receive_mib) as channel:
            call: grpc.aio.StreamStreamCall | None = None
            try:
                # A call on a channel that is not ready would wait inside gRPC, out of sight.
                await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_MS / 1000)
                self._call = call = self._open_call(channel)
                if (first := await self._first_message(call)) is not None:
                    self._set_channel(channel)
                    self._owner.take_message(first)
                    await self._pump(call)
            except TimeoutError:
                _logger.debug("%s is not there yet", self._peer, extra={"address": self._address})
            except grpc.aio.AioRpcError as error:
                self._tell_trouble(f"{error.code().name}: {error.details() or ''}")
            except (ValueError, RequestError) as error:
                self._tell_trouble(f"it broke the contract: {error}")
            except asyncio.CancelledError:
                # Reading a call that the writer gave up raises this too; only ours is passed on.
                if is_task_cancelled():
                    raise
            finally:
                if call is not None:
                    call.cancel()
                self._call = None
                was_up = self.is_connected
                self._set_channel(None)
        return was_up and time.monotonic() - began_at >= RECONNECT_MAX_S

    async def _first_message(self, call: grpc.aio.StreamStreamCall) -> Any | None:  # noqa: ANN401  # as above
        """What the peer says first; None when it says nothing."""
        try:
            message = await asyncio.wait_for(call.read(), FIRST_MESSAGE_S)
        except TimeoutError:
            self._tell_trouble(f"it took the connection and said nothing for {FIRST_MESSAGE_S:g} s")
            return None
        if message is grpc.aio.EOF:
            self._tell_trouble(f"it ended the stream at once: {(await call.code()).name}")
            return None
        return message

    def _tell_trouble(self, reason: str) -> None:
        """Say why there is no stream, once in a while where it stays so."""
        now = time.monotonic()
        if reason != self._trouble or now - self._told_at >= SAME_TROUBLE_S:
            self._trouble, self._told_at = reason, now
            text = "the %s at %s is not there, or is none: %s"
            _logger.warning(text, self._peer, self._address, reason)

    async def _pump(self, call: grpc.aio.StreamStreamCall) -> None:
        """Read until the stream ends; the writer ends with it."""
        writer = asyncio.create_task(self._write(call))
        writer.add_done_callback(lambda _: call.cancel())
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self._owner.take_message(message)
        finally:
            writer.cancel()
            await asyncio.wait({writer})
        _logger.warning("%s closed the connection", self._peer)

    async def _write(self, call: grpc.aio.StreamStreamCall) -> None:
        """Send what is ready; when it ends, for whatever reason, the reader is told."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._outgoing.wait()
                self._outgoing.clear()
                while (message := self._owner.next_message()) is not None:
                    await call.write(message)

    def _set_channel(self, channel: grpc.aio.Channel | None) -> None:
        was_connected, self.channel = self.is_connected, channel
        if was_connected != self.is_connected:
            state = "connected" if self.is_connected else "disconnected"
            _logger.info("%s %s", self._peer, state, extra={"address": self._address})
            self._owner.connection_changed(self.is_connected)


class Silence:
    """For how long a peer that promised signs of life has said nothing.

    Looks are counted, and not seconds: where this process stood still itself, what the peer said
    lies there unread.
    """

    def __init__(self) -> None:
        """It has said nothing yet."""
        self._has_spoken = False
        self._num_looks = 0

    def hear(self) -> None:
        """The peer said something."""
        self._has_spoken = True

    def look(self, *, is_promised: bool) -> int:
        """Looks since the peer spoke; 0 while it owes no sign of life."""
        self._num_looks = self._num_looks + 1 if is_promised and not self._has_spoken else 0
        self._has_spoken = False
        return self._num_looks


class SubmitQueue(Generic[MessageT]):
    """Submits that wait for the next message, which holds at most `max_bytes` of them."""

    def __init__(self, max_bytes: int) -> None:
        """Empty."""
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[MessageT, int]] = deque()

    def __len__(self) -> int:
        """Submits that wait."""
        return len(self._waiting)

    def check(self, message: MessageT) -> int:
        """Size of the submit in bytes; `RequestError` when no message can hold it."""
        size = message.ByteSize()
        if size > self._max_bytes:
            raise RequestError(
                FailureReason.INVALID_ARGUMENT,
                f"the request is larger than {self._max_bytes} bytes with all its choices; "
                "ask for fewer choices or prompts",
            )
        return size

    def put(self, message: MessageT, size: int) -> None:
        """Append one, with the size that `check` told."""
        self._waiting.append((message, size))

    def take(self) -> list[MessageT]:
        """The submits of the next message, in order."""
        taken, total = [], 0
        while self._waiting and total + self._waiting[0][1] <= self._max_bytes:
            message, size = self._waiting.popleft()
            taken.append(message)
            total += size
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()


class StreamIds:
    """Small integers that name requests on a connection, not reused while `is_live` says so."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        """Start after 0."""
        self._is_live = is_live
        self._last = 0

    def fresh(self) -> int:
        """The next free id."""
        while True:
            self._last = (self._last + 1) % _ID_LIMIT
            if not self._is_live(self._last):
                return self._last


def _may_answer(address: str) -> bool:
    return not address.startswith("unix:") or os.path.exists(address.removeprefix("unix:"))
