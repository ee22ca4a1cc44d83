"""Work beside other work: what the shared expert has to do while tokens travel to the routed ones.

A device has streams, which run beside each other and wait where they are told to. A host has one
order of work, which is the same: what is started runs at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

Work = Callable[[Tensor], Tensor]


class Beside(Protocol):
    """Where work is started."""

    def start(self, work: Work, x: Tensor) -> Callable[[], Tensor]:
        """Start `work` on `x`; what comes back waits for the result."""
        ...


class InLine:
    """One order of work."""

    def start(self, work: Work, x: Tensor) -> Callable[[], Tensor]:
        """Do it now."""
        result = work(x)
        return lambda: result


class DeviceStream(Protocol):
    """A stream of a device, as torch has it."""

    def wait_stream(self, stream: DeviceStream) -> None:
        """What is put in from now on runs after what `stream` has."""
        ...


class Streams(Protocol):
    """A device's streams: the module that torch_npu adds to torch."""

    def Stream(self) -> DeviceStream:  # torch's name
        """A new one."""
        ...

    def current_stream(self) -> DeviceStream:
        """That into which operators are put."""
        ...

    def stream(self, stream: DeviceStream) -> AbstractContextManager[object]:
        """Operators inside are put into `stream`."""
        ...


class SecondStream:
    """A stream of its own, of which the first one waits when it wants the result.

    Memory is told which streams use it: its allocator knows of the one alone that made it.
    """

    def __init__(self, streams: Streams) -> None:
        """Make the stream; a captured step takes it along, as it is forked from its own."""
        self._streams = streams
        self._second = streams.Stream()

    def start(self, work: Work, x: Tensor) -> Callable[[], Tensor]:
        """Do it behind all that the first stream has so far."""
        second, first = self._second, self._streams.current_stream()
        second.wait_stream(first)
        with self._streams.stream(second):
            result = work(x)
        _mark(x, second)

        def wait() -> Tensor:
            first.wait_stream(second)
            _mark(result, first)
            return result

        return wait


def _mark(x: Tensor, stream: DeviceStream) -> None:
    """`x` is in use by another stream than its own, until that has done what it has now."""
    x.record_stream(stream)  # type: ignore[arg-type]  # a device's own class
