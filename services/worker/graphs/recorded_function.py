"""A function of a number of rows that is recorded once and then run from the record."""

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.graphs.arena import Arena, Loans
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import KernelCall, Recording
from services.worker.graphs.template import Sample, Template
from services.worker.ops.native import Native

Rows = Callable[[int], tuple[Tensor, ...]]
"""Computes the first so many rows of buffers that stay where they are."""

# One row is no template's: what lies apart for two rows lies together for one.
_LEAST_OF_TEMPLATE = 2
_LEAST_LARGEST = 4


class RecordedFunction:
    """What a function of the model does with 1 to `max_rows` rows, without Python."""

    def __init__(self, native: Native, arena: Arena, function: Rows, max_rows: int) -> None:
        """Record it.

        Raises:
            CaptureError: It does what cannot be done from a record.
        """
        self._native = native
        self._arena = arena
        self._function = function
        self._by_size: dict[int, Recording] = {}
        self._template: Template | None = None
        if max_rows >= _LEAST_LARGEST:
            self._template = self._make_template(max_rows)
            max_rows = _LEAST_OF_TEMPLATE - 1
        for num_rows in range(1, max_rows + 1):
            self._by_size[num_rows] = self.record(num_rows)

    def run(self, num_rows: int) -> tuple[Tensor, ...]:
        """The function's results; they lie in the arena, until the next function runs there."""
        recording = self._by_size.get(num_rows)
        if recording is not None:
            recording.run()
            return recording.result
        assert self._template is not None
        return self._template.run(num_rows)

    def measure(self, num_rows: int) -> list[tuple[KernelCall, float]]:
        """Run it, and say how many seconds each kernel took."""
        if num_rows in self._by_size:
            return self._by_size[num_rows].measure()
        assert self._template is not None
        return self._template.measure(num_rows)

    @torch.inference_mode()
    def record(self, num_rows: int, plan: Loans | None = None) -> Recording:
        """What the function does now with so many rows."""
        return record(self._native, self._arena, lambda: self._function(num_rows), plan)

    def _make_template(self, max_rows: int) -> Template:
        largest = self.record(max_rows)
        plan = self._arena.loans
        samples = [Sample(num_rows=max_rows, recording=largest)]
        # An odd number in between: neither half nor a power of two nor a whole tile.
        for num_rows in ((max_rows // 2) | 1, _LEAST_OF_TEMPLATE):
            samples.append(Sample(num_rows=num_rows, recording=self.record(num_rows, plan)))
        return Template(samples)
