"""What was taken down of a step, and doing it again: one call into C for each run of kernels."""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.native import Native, failure


class CaptureError(Exception):
    """A step cannot be captured as it is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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

    def packed(self) -> bytes:
        """Arguments as the kernel's caller in C reads them, 8 bytes each."""
        kinds = "".join("d" if isinstance(number, float) else "q" for number in self.numbers)
        return struct.pack(f"={kinds}{len(self.addresses)}Q", *self.numbers, *self.addresses)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostCall:
    """A call that stays one of Python's: a collective."""

    operator: str
    function: Callable[..., object]
    arguments: tuple[Any, ...] = ()

    def run(self) -> None:
        """Call it, and wait until it is done."""
        result = self.function(*self.arguments)
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.ScriptObject):
                part.wait()  # type: ignore[attr-defined]  # a work


Call = KernelCall | HostCall


class Segment:
    """Kernels between two host calls, as csrc/replay.c reads them."""

    def __init__(self, native: Native, calls: Sequence[KernelCall]) -> None:
        self._native = native
        self.calls = tuple(calls)
        packed = [call.packed() for call in calls]
        self.arguments: NDArray[np.int64] = np.frombuffer(b"".join(packed), np.int64).copy()
        """Of all calls behind each other; what is written here is what the kernels get."""
        self._records = np.zeros((len(calls), 3), np.int64)
        start = self.arguments.ctypes.data
        for place, call in enumerate(calls):
            self._records[place] = (*native.addresses(call.name, call.dtype), start)
            start += len(packed[place])
        self._address: int = self._records.ctypes.data  # numpy takes a microsecond to tell it

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

    def measure(self) -> list[tuple[KernelCall, float]]:
        """Call all kernels and say how many seconds each took."""
        seconds = np.zeros(len(self.calls))
        self.run(seconds)
        return list(zip(self.calls, seconds.tolist(), strict=True))


class Recording:
    """A step that was taken down. It keeps what it reads and what it returns."""

    def __init__(self, native: Native, calls: Sequence[Call], result: tuple[Tensor, ...]) -> None:
        self.result = result
        self.parts: list[Segment | HostCall] = []
        kernels: list[KernelCall] = []
        for call in calls:
            if isinstance(call, KernelCall):
                kernels.append(call)
                continue
            if kernels:
                self.parts.append(Segment(native, kernels))
            self.parts.append(call)
            kernels = []
        if kernels:
            self.parts.append(Segment(native, kernels))

    def run(self) -> None:
        """Do the step again, on what now is at its addresses."""
        for part in self.parts:
            part.run()

    def calls(self) -> Iterator[Call]:
        """What was taken down, in order."""
        for part in self.parts:
            if isinstance(part, HostCall):
                yield part
            else:
                yield from part.calls

    def measure(self) -> list[tuple[KernelCall, float]]:
        """Do the step again and say how long each kernel took, in seconds."""
        times: list[tuple[KernelCall, float]] = []
        for part in self.parts:
            if isinstance(part, HostCall):
                part.run()
                continue
            times += part.measure()
        return times


def difference(one: Call, other: Call) -> str:
    """What is another way in a call of the same step; empty where nothing is.

    A number or an address that belongs to one step only would be frozen in all others.
    """
    if not isinstance(one, KernelCall) or not isinstance(other, KernelCall):
        is_same = type(one) is type(other) and one.operator == other.operator
        return "" if is_same else f"{one.operator} became {other.operator}"
    for part in ("operator", "name", "dtype", "numbers", "addresses"):
        ours, theirs = getattr(one, part), getattr(other, part)
        if ours != theirs:
            return f"{one.operator}: {part} {ours} became {theirs}"
    return ""
