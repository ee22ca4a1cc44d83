"""What was taken down of a step, and running it again: one call into C for each run of kernels."""

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.native import Native, failure


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One call of a compiled kernel."""

    operator: str
    """Whose call it is, as the model called it."""
    name: str
    dtype: torch.dtype
    numbers: tuple[float, ...]
    addresses: tuple[int, ...]
    tensors: tuple[Tensor, ...] = ()
    """Those among the arguments that nobody else keeps."""

    def difference(self, other: "KernelCall") -> str:
        """What is another way in `other`; empty where nothing is."""
        for part in ("operator", "name", "dtype", "numbers", "addresses"):
            ours, theirs = getattr(self, part), getattr(other, part)
            if ours != theirs:
                return f"{self.operator}: {part} {ours} became {theirs}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A call that stays one of Python's: a collective."""

    operator: str
    run: Callable[[], object]


class _Segment:
    """Kernels between two host calls, as csrc/replay.c reads them."""

    def __init__(self, native: Native, calls: Sequence[KernelCall]) -> None:
        self._native = native
        self.calls = tuple(calls)
        arguments = [_packed(call) for call in calls]
        ends = np.cumsum([len(packed) for packed in arguments])
        self._arguments = np.frombuffer(b"".join(arguments) or b"\0" * 8, np.int64)
        self._records = np.zeros((max(1, len(calls)), 3), np.int64)
        starts = self._arguments.ctypes.data + ends - [len(packed) for packed in arguments]
        for place, call in enumerate(calls):
            self._records[place, :2] = native.addresses(call.name, call.dtype)
            self._records[place, 2] = starts[place]
        self._address = self._records.ctypes.data

    def run(self, seconds: NDArray[np.float64] | None = None) -> None:
        """Call all kernels in order.

        Args:
            seconds: [N] gets the time of each added.

        Raises:
            ValueError: A kernel refused its arguments.
        """
        times = None if seconds is None else seconds.ctypes.data
        status, place = self._native.replay(len(self.calls), self._address, times)
        if status:
            raise failure(self.calls[place].name, status)


class Recording:
    """A step that was taken down. It keeps what it reads and what it returns."""

    def __init__(
        self, native: Native, steps: Sequence[KernelCall | HostCall], result: object
    ) -> None:
        self.result = result
        self._parts: list[_Segment | HostCall] = []
        calls: list[KernelCall] = []
        for step in steps:
            if isinstance(step, KernelCall):
                calls.append(step)
                continue
            self._parts += [_Segment(native, calls), step]
            calls = []
        self._parts.append(_Segment(native, calls))

    def run(self) -> None:
        """Do the step again, on what now is at its addresses."""
        for part in self._parts:
            part.run()

    def steps(self) -> Iterator[KernelCall | HostCall]:
        """What was taken down, in order."""
        for part in self._parts:
            if isinstance(part, HostCall):
                yield part
            else:
                yield from part.calls

    def measure(self) -> list[tuple[KernelCall | HostCall, float]]:
        """Do the step again and say how long each kernel took, in seconds."""
        times: list[tuple[KernelCall | HostCall, float]] = []
        for part in self._parts:
            if isinstance(part, HostCall):
                part.run()
                continue
            seconds = np.zeros(len(part.calls))
            part.run(seconds)
            times += zip(part.calls, seconds.tolist(), strict=True)
        return times

    def difference(self, other: "Recording") -> str:
        """What `other` does another way first; empty where it is the same step.

        A number or an address that belongs to one step only would be frozen in all later ones.
        """
        ours, theirs = list(self.steps()), list(other.steps())
        for one, two in zip(ours, theirs, strict=False):
            if isinstance(one, KernelCall) and isinstance(two, KernelCall):
                if found := one.difference(two):
                    return found
            elif one.operator != two.operator:
                return f"{one.operator} became {two.operator}"
        if len(ours) != len(theirs):
            return f"{len(ours)} calls became {len(theirs)}"
        return ""


def _packed(call: KernelCall) -> bytes:
    """Arguments of 8 bytes each."""
    numbers = b"".join(
        struct.pack("d", number) if isinstance(number, float) else struct.pack("q", number)
        for number in call.numbers
    )
    return numbers + b"".join(ctypes.c_uint64(address) for address in call.addresses)
