"""One request on the connection to the detokenizer: verdict, bytes, end.

    submitted --verdict ok--> admitted --frames*--> ended (good or bad)
        `-----refused-----> ended (bad)

The connection's reader pushes, one HTTP handler awaits. The law: the first end stands, what comes
after it is dropped; what was pushed before is still read. Bytes that wait here are bounded by the
credit of the request. As long as none has left, everything may begin anew elsewhere (`restart`);
the handler does not notice, and an answer that was admitted once stays so.
"""

import asyncio
from collections.abc import Callable, Mapping

from services.frontend.tools_constraint import name_field
from shared.errors import RequestError
from shared.sampling import SequenceStats


class Exchange:
    """The mailbox of one request."""

    __slots__ = (
        "_constraint_param",
        "_pieces",
        "_waiter",
        "error",
        "finish_reason",
        "has_left",
        "is_admitted",
        "is_ended",
        "num_bytes",
        "num_sequences",
        "object_json",
        "oddities",
        "request_id",
        "sink",
        "stats",
        "stream_id",
    )

    def __init__(self, request_id: str, constraint_param: str = "") -> None:
        """Wait for a verdict; `constraint_param` names what a constraint came from."""
        self._constraint_param = constraint_param
        # Of its connection, which sets these three when it takes the request.
        self.stream_id = 0
        self.num_bytes = 0
        self.num_sequences = 0
        self.request_id = request_id
        # Whether bytes were handed out for the client.
        self.has_left = False
        self.is_admitted = False
        self.is_ended = False
        self.error: RequestError | None = None
        self.finish_reason = ""
        self.stats: SequenceStats | None = None
        # The finished object of a stream, where it was asked for.
        self.object_json = b""
        # What the model did not do as its dialect wants it, counts by kind.
        self.oddities: Mapping[str, int] = {}
        # Takes a piece past the reader, who must be waiting; false: the piece has to wait.
        self.sink: Callable[[bytes], bool] | None = None
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def admit(self) -> None:
        """The request was taken."""
        self.is_admitted = True
        self.wake()

    def push(self, piece: bytes) -> None:
        """Bytes for the client; they wait unless `sink` takes them at once."""
        if self.is_ended:
            return
        if self.sink is not None and not self._pieces and self.sink(piece):
            self.has_left = True
            return
        self._pieces.append(piece)
        self.wake()

    def restart(self) -> None:
        """Forget what has come: the request begins anew on another connection."""
        assert not self.has_left
        assert not self.is_ended
        self._pieces = []

    def finish(
        self,
        reason: str,
        stats: SequenceStats,
        object_json: bytes = b"",
        oddities: Mapping[str, int] | None = None,
    ) -> None:
        """The good end; `reason` is that of the first choice."""
        if not self.is_ended:
            self.oddities = oddities or {}
            self.object_json = object_json
            self.finish_reason = reason
            self.stats = stats
            self.is_ended = True
            self.wake()

    def fail(self, error: RequestError) -> None:
        """The bad end, or the refusal."""
        if not self.is_ended:
            self.error = name_field(error, self._constraint_param)
            self.is_ended = True
            self.wake()

    def wake(self) -> None:
        """Let a waiting reader look again, also without news."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until something is pushed, the end has come or `wake` was called."""
        if not self._pieces and not self.is_ended:
            await self._sleep()

    async def wait_for_verdict(self) -> None:
        """Until admitted; raises the refusal."""
        while not (self.is_admitted or self.is_ended):
            await self._sleep()
        if self.error is not None and not self.is_admitted:
            raise self.error

    async def wait_for_end(self) -> bytes:
        """All bytes after the good end; raises the bad one."""
        while not self.is_ended:
            await self._sleep()
        if self.error is not None:
            raise self.error
        return self.take()

    def take(self) -> bytes:
        """The bytes that wait, as one piece; empty if none do."""
        pieces = self._pieces
        if not pieces:
            return b""
        self._pieces = []
        self.has_left = True
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _sleep(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
