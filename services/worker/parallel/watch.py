"""The ranks of a world watch over each other, beside their work and without its groups.

Every rank tells rank 0 twice a second where it is, over a socket of its own and from a thread of
its own, and rank 0 answers. So a rank that died (the socket closes), one that hangs (its position
stays), one that stands still altogether (silence) and one that failed (it says so) are known by
name, while the others wait in an exchange that cannot tell them anything.

Law: a world ends once and for all with the first verdict, which every rank that is left hears.
"""

from __future__ import annotations

import json
import queue
import secrets
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from torch.distributed import Store  # type: ignore[attr-defined]  # torch lists no exports

from services.worker.parallel.line import Line
from services.worker.parallel.progress import Position, Progress
from services.worker.parallel.verdict import Heard, find_stall
from shared.log import get_logger

_log = get_logger(__name__)

_PULSE_S: Final = 0.5
_POLL_S: Final = 0.1
_GRACE_S: Final = 1.0
"""A broken exchange is the echo of something; so long the cause may still tell itself."""
_ADDRESS: Final = "watch"


class Watch(Protocol):
    """One rank's view of its world."""

    @property
    def verdict(self) -> str:
        """Why the world is lost, naming rank and step; empty while it stands."""
        ...

    def start(self) -> None:
        """Begin to watch."""
        ...

    def fail(self, reason: str, *, is_echo: bool) -> None:
        """This rank cannot go on; an echo is an exchange that broke, for whatever reason."""
        ...

    def close(self) -> None:
        """Leave in good order."""
        ...


def make_watch(
    store: Store, rendezvous: str, *, rank: int, size: int, progress: Progress, limit_s: float
) -> Watch:
    """Rank 0 listens, the others find its address in the store.

    Args:
        store: Where the ranks met.
        rendezvous: Its address; rank 0 listens on the same host, else on loopback.
        rank: This rank.
        size: Ranks of the world.
        progress: What this rank does.
        limit_s: Time without progress after which the world is lost.
    """
    if rank == 0:
        hub = Hub(urlsplit(rendezvous).hostname or "127.0.0.1", size, progress, limit_s)
        store.set(_ADDRESS, json.dumps(hub.address))
        return hub
    host, port, token = json.loads(store.get(_ADDRESS))
    line = Line(socket.create_connection((host, port), timeout=limit_s))
    return Spoke(line, token, rank, progress, limit_s)


class Beat:
    """A thread that takes turns until it is closed, and remembers the first verdict."""

    def __init__(self, turn: Callable[[], None], end: Callable[[], None]) -> None:
        self._turn = turn
        self._end = end
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.verdict = ""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Take the last turn."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def decide(self, reason: str) -> bool:
        """Whether this is the first verdict."""
        if self.verdict:
            return False
        self.verdict = reason
        _log.error("the world is lost", extra={"reason": reason})
        return True

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._turn()
        finally:
            self._end()


@dataclass(slots=True)
class _Member:
    """What the hub knows of another rank."""

    line: Line
    position: Position
    heard_at: float
    has_left: bool = False
    """In good order: nobody waits for it any more."""


class Hub:
    """Rank 0's side: hears all, decides."""

    def __init__(self, host: str, size: int, progress: Progress, limit_s: float) -> None:
        self._listener = socket.create_server((host, 0), backlog=size)
        self._listener.setblocking(False)
        self._token = secrets.token_hex(16)
        self.address = (host, self._listener.getsockname()[1], self._token)
        self._progress = progress
        self._limit_s = limit_s
        self._members: dict[int, _Member] = {}
        self._strangers: list[Line] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._failures: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._echo: tuple[float, str] | None = None
        self._next_pulse_at = 0.0
        self._beat = Beat(self._turn, self._end)
        self.start, self.close = self._beat.start, self._beat.close

    @property
    def verdict(self) -> str:
        """Why the world is lost; empty while it stands."""
        return self._beat.verdict

    def fail(self, reason: str, *, is_echo: bool) -> None:
        """Rank 0 cannot go on."""
        self._failures.put((f"rank 0 {reason}", is_echo))

    def _turn(self) -> None:
        for key, _ in self._selector.select(_POLL_S):
            if key.fileobj is self._listener:
                self._accept()
            else:
                self._read(key.data)
        while not self._failures.empty():
            self._take(*self._failures.get())
        now = time.monotonic()
        if self._echo is not None and now - self._echo[0] > _GRACE_S:
            self._decide(self._echo[1])
        if now >= self._next_pulse_at:
            self._next_pulse_at = now + _PULSE_S
            for member in self._members.values():
                member.line.send(alive=True)
            if stall := find_stall(self._heard(now), self._limit_s):
                self._decide(stall)

    def _accept(self) -> None:
        line = Line(self._listener.accept()[0])
        self._strangers.append(line)
        self._selector.register(line.socket, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        messages, is_closed = line.receive()
        for message in messages:
            self._hear(line, message)
        if is_closed:
            self._lose(line)

    def _hear(self, line: Line, message: dict[str, Any]) -> None:
        rank = self._rank_of(line)
        if rank is None:
            # Whatever else finds the port says nothing that counts.
            if line in self._strangers and message.get("token") == self._token:
                self._strangers.remove(line)
                self._members[int(message["rank"])] = _Member(line, Position(), time.monotonic())
            return
        member = self._members[rank]
        member.heard_at = time.monotonic()
        if "position" in message:
            member.position = Position(**message["position"])
        elif "failed" in message:
            self._take(f"rank {rank} {message['failed']}", bool(message["is_echo"]))
        elif "bye" in message:
            member.has_left = True

    def _rank_of(self, line: Line) -> int | None:
        return next((rank for rank, one in self._members.items() if one.line is line), None)

    def _lose(self, line: Line) -> None:
        rank = self._rank_of(line)
        self._selector.unregister(line.socket)
        line.close()
        if rank is None:
            self._strangers.remove(line)
        elif not self._members.pop(rank).has_left:
            # What it said last may be half a second old; in a step all ranks are in the same one.
            own = self._progress.position()
            self._decide(f"rank {rank}: its process ended; rank 0 is {own}")

    def _heard(self, now: float) -> dict[int, Heard]:
        heard = {
            rank: Heard(position=one.position, age_s=now - one.heard_at)
            for rank, one in self._members.items()
            if not one.has_left
        }
        return {0: Heard(position=self._progress.position(), age_s=0.0), **heard}

    def _take(self, reason: str, is_echo: bool) -> None:
        if not is_echo:
            self._decide(reason)
        elif self._echo is None:
            self._echo = (time.monotonic(), reason)

    def _decide(self, reason: str) -> None:
        if self._beat.decide(reason):
            for member in self._members.values():
                member.line.send(verdict=reason)

    def _end(self) -> None:
        for member in self._members.values():
            member.line.send(bye=True)
            member.line.close()
        for line in self._strangers:
            line.close()
        self._selector.close()
        self._listener.close()


class Spoke:
    """Another rank's side: tells, hears."""

    def __init__(
        self, line: Line, token: str, rank: int, progress: Progress, limit_s: float
    ) -> None:
        self._line = line
        self._progress = progress
        self._rank = rank
        self._limit_s = limit_s
        self._heard_at = time.monotonic()
        self._is_bye = False
        self._next_pulse_at = 0.0
        self._failures: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._beat = Beat(self._turn, self._end)
        self.start, self.close = self._beat.start, self._beat.close
        line.send(token=token, rank=rank)

    @property
    def verdict(self) -> str:
        """Why the world is lost; empty while it stands."""
        return self._beat.verdict

    def fail(self, reason: str, *, is_echo: bool) -> None:
        """This rank cannot go on."""
        self._failures.put((reason, is_echo))

    def _turn(self) -> None:
        readable, _, _ = select.select([self._line.socket], [], [], _POLL_S)
        if readable:
            self._read()
        while not self._failures.empty():
            reason, is_echo = self._failures.get()
            self._line.send(failed=reason, is_echo=is_echo)
        now = time.monotonic()
        if now >= self._next_pulse_at:
            self._next_pulse_at = now + _PULSE_S
            self._line.send(position=asdict(self._progress.position()))
        silence = now - self._heard_at
        if silence > self._limit_s:
            # Where this rank is tells the step: in a step all ranks are in the same one.
            own = self._progress.position()
            said = f"rank 0 has been silent for {silence:.1f} s"
            self._beat.decide(f"{said}; rank {self._rank} is {own}")

    def _read(self) -> None:
        messages, is_closed = self._line.receive()
        for message in messages:
            self._heard_at = time.monotonic()
            if "verdict" in message:
                self._beat.decide(message["verdict"])
            self._is_bye = self._is_bye or "bye" in message
        if is_closed and not self._is_bye:
            own = self._progress.position()
            self._beat.decide(f"rank 0: its process ended; rank {self._rank} is {own}")
        if is_closed:
            time.sleep(_POLL_S)  # nothing more comes: do not spin until closed

    def _end(self) -> None:
        self._line.send(bye=True)
        self._line.close()
