"""Any order of losses, refusals, bytes, ends and hang-ups: every request ends once and leaves none.

The connections are the real ones without sockets: what a detokenizer says is handed to them.
"""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protos.glm.v1 import common_pb2, detokenizer_pb2
from services.frontend.detokenizer_client import DetokenizerClient
from services.frontend.detokenizers import Detokenizers
from services.frontend.exchange import Exchange
from services.frontend.resubmission import MAX_LOSSES, ResubmitBounds
from tests.services.frontend.test_detokenizers import submission

NUM_PEERS = 3
Response = detokenizer_pb2.DetokenizerServiceConnectResponse
READY = Response(load=common_pb2.LoadSnapshot(is_worker_ready=True, max_model_len=100))
REASONS = ("DRAINING", "UPSTREAM_LOST", "QUEUE_FULL", "INVALID_ARGUMENT")


class Peer:
    """What one detokenizer holds, and what it has still to say."""

    def __init__(self, client: DetokenizerClient) -> None:
        self.client = client
        self.open: dict[int, str] = {}
        self.undecided: set[int] = set()

    def connect(self) -> None:
        if not self.client.is_connected:
            self.client._link._set_channel(object())  # type: ignore[arg-type]  # never called
            self.client.take_message(READY)

    def lose(self) -> None:
        self.open, self.undecided = {}, set()
        self.client._link._set_channel(None)

    def drain(self) -> None:
        if self.client.is_connected:
            self.client.take_message(Response(is_draining=True))

    def read(self) -> None:
        """Take what was sent to it."""
        while self.client.is_connected and (message := self.client.next_message()) is not None:
            for submit in message.submits:
                assert submit.stream_id not in self.open, "a stream id in use"
                self.open[submit.stream_id] = submit.submit.request_id
                self.undecided.add(submit.stream_id)
            for stream_id in message.aborted_stream_ids:
                if self.open.pop(stream_id, None) is not None:
                    self.undecided.discard(stream_id)
                    failed = common_pb2.Failure(reason=common_pb2.FAILURE_REASON_CANCELLED)
                    self._say(ends=[detokenizer_pb2.TextEnd(stream_id=stream_id, failed=failed)])

    def decide(self, pick: int, reason: str | None) -> None:
        if not self.undecided:
            return
        stream_id = sorted(self.undecided)[pick % len(self.undecided)]
        self.undecided.discard(stream_id)
        refusal = None
        if reason is not None:
            del self.open[stream_id]
            refusal = common_pb2.Failure(reason=f"FAILURE_REASON_{reason}", message="no")
        verdict = detokenizer_pb2.TextVerdict(stream_id=stream_id, refusal=refusal)
        self._say(verdicts=[verdict])

    def speak(self, pick: int, data: bytes, *, is_end: bool) -> None:
        admitted = sorted(self.open.keys() - self.undecided)
        if not admitted:
            return
        stream_id = admitted[pick % len(admitted)]
        name = self.open[stream_id].encode()
        said = name + b":" + data + b";"
        frames = detokenizer_pb2.FrameColumns(
            stream_ids=[stream_id], num_bytes=[len(said)], data=said
        )
        self._say(frames=frames)
        if is_end:
            del self.open[stream_id]
            finished = detokenizer_pb2.TextFinished(reason=common_pb2.FINISH_REASON_STOP)
            self._say(ends=[detokenizer_pb2.TextEnd(stream_id=stream_id, finished=finished)])

    def serve(self) -> None:
        """Take what is there, let it all in, and begin to answer."""
        self.read()
        while self.undecided:
            self.decide(0, None)
        for pick in range(len(self.open)):
            self.speak(pick, b"s", is_end=False)

    def _say(self, **message: Any) -> None:
        message["is_draining"] = self.client.is_draining
        self.client.take_message(Response(**message))


class Reader:
    """The client of one request."""

    def __init__(self, exchange: Exchange, *, is_stream: bool) -> None:
        self.exchange = exchange
        self.is_stream = is_stream
        self.data = b""
        self.num_on_their_way = 0
        self.is_closed = False


class World:
    """A pool, its peers and its readers."""

    def __init__(self) -> None:
        self.pool = Detokenizers(
            [f"unix:/none{i}" for i in range(NUM_PEERS)],
            credit_bytes=1000,
            bounds=ResubmitBounds(timeout_s=60.0),
        )
        self.peers = [Peer(client) for client in self.pool.clients]
        self.readers: dict[str, Reader] = {}

    def submit(self, is_stream: bool) -> None:
        if not self.pool.is_connected:
            return
        name = f"r{len(self.readers)}"
        exchange = self.pool.submit(submission(name, is_stream=is_stream))
        self.readers[name] = Reader(exchange, is_stream=is_stream)

    def take(self, pick: int) -> None:
        """Bytes leave for a client."""
        streams = [one for one in self.readers.values() if one.is_stream and not one.is_closed]
        if streams:
            reader = streams[pick % len(streams)]
            data = reader.exchange.take()
            reader.data += data
            reader.num_on_their_way += len(data)

    def credit(self) -> None:
        """What was taken has left."""
        for reader in self.readers.values():
            if not reader.is_closed:
                self.pool.give_credit(reader.exchange, reader.num_on_their_way)
                reader.num_on_their_way = 0

    def close(self, pick: int) -> None:
        live = [one for one in self.readers.values() if not one.is_closed]
        if live:
            reader = live[pick % len(live)]
            reader.is_closed = True
            self.pool.close(reader.exchange)

    def look(self) -> None:
        """The time between two looks has passed."""
        for exchange in list(self.pool._waiting):
            self.pool._look_again(exchange)

    def check(self) -> None:
        places: dict[str, int] = {}
        for peer in self.peers:
            for exchange in peer.client._exchanges.values():
                places[exchange.request_id] = places.get(exchange.request_id, 0) + 1
                assert self.readers[exchange.request_id].exchange is exchange
                assert not self.readers[exchange.request_id].is_closed, "nobody waits for it"
            open_ = peer.client._exchanges.values()
            assert peer.client.num_sequences == sum(one.num_sequences for one in open_)
        assert all(count == 1 for count in places.values()), "one request at two detokenizers"
        for name, reader in self.readers.items():
            exchange, pieces = reader.exchange, reader.data.split(b";")
            # Nothing of another request, and nothing of an earlier attempt behind a later one.
            assert all(piece.startswith(name.encode() + b":") for piece in pieces[:-1])
            is_known = name in places or exchange in self.pool._waiting
            assert is_known or exchange.is_ended or reader.is_closed, "a request was forgotten"
            if reader.data:
                assert exchange not in self.pool._waiting, "it begins twice"

    def finish(self) -> None:
        """Everything comes to an end once the detokenizers do their work."""
        for _ in range(2 * MAX_LOSSES):
            for peer in self.peers:
                peer.lose()
                peer.connect()
            self.look()
            for peer in self.peers:
                peer.read()
                while peer.undecided:
                    peer.decide(0, None)
                while peer.open:
                    peer.speak(0, b"z", is_end=True)
                peer.read()
        for reader in self.readers.values():
            assert reader.exchange.is_ended or reader.is_closed
            if not reader.is_closed:
                self.pool.close(reader.exchange)
        assert self.pool.num_kept_bytes == self.pool.num_open == 0
        assert not self.pool._jobs
        assert all(peer.client.num_sequences == 0 for peer in self.peers)


WHICH = st.integers(0, NUM_PEERS - 1)
PICK = st.integers(0, 7)
EVENTS = st.one_of(
    st.tuples(st.just("submit"), st.booleans()),
    st.tuples(st.just("take"), PICK),
    st.tuples(st.just("credit")),
    st.tuples(st.just("close"), PICK),
    st.tuples(st.just("look")),
    st.tuples(st.just("connect"), WHICH),
    st.tuples(st.just("lose"), WHICH),
    st.tuples(st.just("drain"), WHICH),
    st.tuples(st.just("read"), WHICH),
    st.tuples(st.just("serve"), WHICH),
    st.tuples(st.just("serve"), WHICH),
    st.tuples(st.just("decide"), WHICH, PICK, st.sampled_from((None, None, *REASONS))),
    st.tuples(st.just("speak"), WHICH, PICK, st.sampled_from((b"a", b"b")), st.booleans()),
)


@settings(max_examples=250, deadline=None)
@given(events=st.lists(EVENTS, min_size=30, max_size=100))
def test_every_request_ends_once_whatever_is_lost_when(events: list[tuple[Any, ...]]) -> None:
    async def run() -> None:
        world = World()
        for peer in world.peers:
            peer.connect()
        for is_stream in (True, False, True):
            world.submit(is_stream)
        for name, *rest in events:
            if name in ("submit", "take", "credit", "close", "look"):
                getattr(world, name)(*rest)
            elif name == "speak":
                world.peers[rest[0]].speak(rest[1], rest[2], is_end=rest[3])
            else:
                getattr(world.peers[rest[0]], name)(*rest[1:])
            world.check()
        world.finish()

    asyncio.run(run())
