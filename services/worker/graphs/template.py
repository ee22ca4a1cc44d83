"""One recording for steps of all sizes: what grows with the number of rows is worked out.

Rows stand behind each other, so a step of fewer rows does the same at the same addresses and only
its counts are smaller. From recordings of three sizes follows how: a number stays, or it grows
evenly. Two sizes tell the growth, the third must agree; where it does not, or where the steps
differ otherwise, each size needs a recording of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from services.worker.graphs.recording import (
    Call,
    CaptureError,
    HostCall,
    KernelCall,
    Recording,
    Segment,
    difference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A recording of a step with so many rows."""

    num_rows: int
    recording: Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """A run of kernels whose arguments follow the number of rows."""

    segment: Segment
    most: NDArray[np.int64]
    """Arguments for the largest step."""
    slopes: NDArray[np.int64]
    """What each of them loses for each row that is missing."""

    def set_rows(self, num_missing: int) -> None:
        np.multiply(self.slopes, -num_missing, out=self.segment.arguments)
        self.segment.arguments += self.most


class Template:
    """A step of any number of rows up to that of the largest sample."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Find out how the samples' calls grow.

        Args:
            samples: Three, of the same step with different numbers of rows, largest first; all at
                the addresses of the first.

        Raises:
            CaptureError: They are not the same step, or a number does not grow evenly.
        """
        largest = samples[0]
        self._sizes = [sample.num_rows for sample in samples]
        self._most = self._num_rows = largest.num_rows
        lists = [list(sample.recording.calls()) for sample in samples]
        if len({len(calls) for calls in lists}) > 1:
            raise CaptureError(f"steps of {self._sizes} rows make different calls")
        slopes = [self._grow(*calls) for calls in zip(*lists, strict=True)]
        self._parts: list[_Scaled | HostCall] = []
        for part in largest.recording.parts:
            if isinstance(part, HostCall):
                self._parts.append(part)
                del slopes[0]
                continue
            count = len(part.calls)
            flat = np.concatenate(slopes[:count])
            del slopes[:count]
            self._parts.append(_Scaled(segment=part, most=part.arguments.copy(), slopes=flat))
        self._largest_result = self._result = largest.recording.result
        self._result = self._slices(self._most)

    def run(self, num_rows: int) -> tuple[Tensor, ...]:
        """Do the step with so many rows: its results, which lie where the last ones lay."""
        self._set_rows(num_rows)
        for part in self._parts:
            if isinstance(part, _Scaled):
                part.segment.run()
            else:
                self._cut(part).run()
        return self._result

    def measure(self, num_rows: int) -> list[tuple[KernelCall, float]]:
        """Do the step and say how many seconds each kernel took."""
        self._set_rows(num_rows)
        times: list[tuple[KernelCall, float]] = []
        for part in self._parts:
            if isinstance(part, _Scaled):
                times += part.segment.measure()
            else:
                self._cut(part).run()
        return times

    def _set_rows(self, num_rows: int) -> None:
        if num_rows == self._num_rows:
            return
        assert 0 < num_rows <= self._most
        for part in self._parts:
            if isinstance(part, _Scaled):
                part.set_rows(self._most - num_rows)
        self._num_rows = num_rows
        self._result = self._slices(num_rows)

    def _slices(self, num_rows: int) -> tuple[Tensor, ...]:
        return tuple(self._first_rows(result, num_rows) for result in self._largest_result)

    def _cut(self, call: HostCall) -> HostCall:
        """A call of the host with the first rows of its tensors."""
        arguments = tree_map(self._cut_argument, call.arguments)
        return replace(call, arguments=arguments)

    def _cut_argument(self, value: object) -> object:
        return self._first_rows(value, self._num_rows) if isinstance(value, Tensor) else value

    def _first_rows(self, tensor: Tensor, num_rows: int) -> Tensor:
        per_row, rest = divmod(len(tensor), self._most)
        assert not rest, tensor.shape
        return tensor[: per_row * num_rows]

    def _grow(self, large: Call, middle: Call, small: Call) -> NDArray[np.int64]:
        """What is lost of each argument of a kernel with each row."""
        for other in (middle, small):
            if found := difference(_without_numbers(large), _without_numbers(other)):
                raise CaptureError(f"steps of {self._sizes} rows differ: {found}")
        if not isinstance(large, KernelCall):
            self._check_host_call(large, middle, small)
            return np.empty(0, np.int64)
        assert isinstance(middle, KernelCall)
        assert isinstance(small, KernelCall)
        slopes = np.zeros(len(large.numbers) + len(large.addresses), np.int64)
        each = zip(large.numbers, middle.numbers, small.numbers, strict=True)
        for place, numbers in enumerate(each):
            slope = self._slope(*numbers)
            if slope is None:
                raise CaptureError(
                    f"{large.operator}: a number of {large.name} is {numbers} "
                    f"for {self._sizes} rows"
                )
            slopes[place] = slope
        return slopes

    def _slope(self, large: float, middle: float, small: float) -> int | None:
        """How much a number grows with each row; None where it does not do so evenly."""
        if large == middle == small:
            return 0
        if not all(isinstance(number, int) for number in (large, middle, small)):
            return None
        most, between, least = self._sizes
        slope, rest = divmod(int(large - small), most - least)
        return None if rest or middle != large - slope * (most - between) else slope

    def _check_host_call(self, *calls: Call) -> None:
        """Its tensors are the first rows of the largest step's, and nothing else differs."""
        forms = []
        for num_rows, call in zip(self._sizes, calls, strict=True):
            assert isinstance(call, HostCall)
            forms.append(tree_map(lambda value, n=num_rows: _form(value, n), call.arguments))
        if forms[0] != forms[1] or forms[0] != forms[2]:
            raise CaptureError(f"{calls[0].operator}: {forms} for {self._sizes} rows")


def _without_numbers(call: Call) -> Call:
    return replace(call, numbers=()) if isinstance(call, KernelCall) else call


def _form(value: Any, num_rows: int) -> object:  # noqa: ANN401  an argument of any operator
    """What must be the same of an argument whatever the number of rows."""
    if not isinstance(value, Tensor):
        return str(value)
    per_row, rest = divmod(len(value), num_rows)
    return (value.data_ptr(), value.dtype, per_row, rest, value.shape[1:], value.is_contiguous())
