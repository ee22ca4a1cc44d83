"""Orders of a replica of several ranks: the leader passes its own on before it obeys them.

Every rank of a replica obeys the same orders in the same sequence; that is all that keeps their
rows alike. So whether a plan still counts is decided once, by the leader, when it takes the order:
the server may end an epoch at any moment after that.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch

from services.worker.orders import EndEpoch, Epoch, Order, OrderSource, RunPlan, StartEpoch, Stop
from services.worker.parallel.groups import Group
from services.worker.plan import StepPlan, StepResult
from services.worker.runner import WorldLostError

_HEADER: Final = struct.Struct("<BIQI")
"""Kind, bytes of the plan, number of the epoch, plans in flight."""
_FIRST_BYTES: Final = 2048
"""Of the exchange that every order takes: plans of decode steps fit."""
_LEADER: Final = 0
_START, _RUN, _END, _STOP = range(4)


class LeadingOrders:
    """The leader's orders, passed on. The runner's thread gets them."""

    def __init__(self, source: OrderSource, group: Callable[[], Group]) -> None:
        """`group` is asked for at the first order: it is built on the runner's thread."""
        self._source = source
        self._group = group
        self._given: Epoch | None = None
        """The epoch as the server knows it, which it may end at any time."""
        self._epoch = Epoch(0, 1)
        """The same as this replica's runners know it."""

    def get(self) -> Order:
        """Wait for the next order that counts, and tell the others."""
        while True:
            order = self._source.get()
            match order:
                case StartEpoch(epoch=given):
                    self._given = given
                    self._epoch = Epoch(given.number, given.max_plans_in_flight)
                    order = replace(order, epoch=self._epoch)
                case RunPlan(epoch=given) | EndEpoch(epoch=given):
                    if given is not self._given or (
                        isinstance(order, RunPlan) and (given.is_over or self._epoch.is_over)
                    ):
                        continue
                    order = replace(order, epoch=self._epoch)
                case Stop():
                    pass
            with _lost_with_others():
                self._tell(order)
            return order

    def _tell(self, order: Order) -> None:
        epoch, plan = self._epoch, b""
        match order:
            case StartEpoch():
                kind = _START
            case RunPlan(encode=encode):
                kind, plan = _RUN, encode()
            case EndEpoch():
                kind = _END
            case Stop():
                kind = _STOP
        header = _HEADER.pack(kind, len(plan), epoch.number, epoch.max_plans_in_flight)
        message = bytearray(header + plan)
        first = message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0")
        group = self._group()
        group.broadcast(torch.frombuffer(first, dtype=torch.uint8), _LEADER)
        if len(message) > _FIRST_BYTES:
            rest = message[_FIRST_BYTES:]
            group.broadcast(torch.frombuffer(rest, dtype=torch.uint8), _LEADER)


class FollowingOrders:
    """What the leader passed on. The runner's thread gets them."""

    def __init__(self, group: Callable[[], Group], decode: Callable[[bytes], StepPlan]) -> None:
        self._group = group
        self._decode = decode
        self._epoch = Epoch(0, 1)

    def get(self) -> Order:
        """Wait for the next order."""
        with _lost_with_others():
            message = self._hear()
        kind, size, number, window = _HEADER.unpack_from(message)
        if kind == _START:
            self._epoch = Epoch(number, window)
            return StartEpoch(epoch=self._epoch, opened=_nothing)
        if kind == _RUN:
            plan = self._read(message[_HEADER.size : _HEADER.size + size])
            return RunPlan(epoch=self._epoch, plan=plan, answer=_drop)
        return Stop() if kind == _STOP else EndEpoch(epoch=self._epoch)

    def _read(self, data: bytes) -> StepPlan:
        try:
            return self._decode(data)
        except Exception as error:
            # The leader could: this rank is of another version, and does not know what to do.
            raise WorldLostError(f"a plan of the leader cannot be read: {error}") from error

    def _hear(self) -> bytes:
        group = self._group()
        first = group.broadcast(torch.empty(_FIRST_BYTES, dtype=torch.uint8), _LEADER)
        message = first.numpy().tobytes()
        _, size, _, _ = _HEADER.unpack_from(message)
        more = _HEADER.size + size - _FIRST_BYTES
        if more > 0:
            rest = group.broadcast(torch.empty(more, dtype=torch.uint8), _LEADER)
            message += rest.numpy().tobytes()
        return message


@contextmanager
def _lost_with_others() -> Iterator[None]:
    """A broken exchange of orders is a rank that is gone."""
    try:
        yield
    except RuntimeError as error:
        raise WorldLostError(f"the exchange of orders broke: {error}") from error


def _nothing() -> None:
    """The leader tells that the epoch stands."""


def _drop(result: StepResult) -> None:
    """The leader answers."""
