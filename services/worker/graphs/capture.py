"""How a step is captured: by the device's own graphs, or by a record of kernels on a CPU."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import Recording
from services.worker.ops.native import Native

Step = Callable[[], tuple[Tensor, ...]]
"""Runs the model on tensors that stay where they are."""


class Captured(Protocol):
    """A step that can be done again."""

    @property
    def result(self) -> tuple[Tensor, ...]:
        """Where its results are once it has run, until another captured step runs."""
        ...

    def run(self) -> None:
        """Do it on what its tensors hold now."""
        ...


class Capturer(Protocol):
    """Captures steps; all share one pool of memory."""

    def capture(self, step: Step) -> Captured:
        """Capture a step; CaptureError if that cannot be."""
        ...


class HostCapturer:
    """Records the kernels of a CPU."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._arena = Arena()

    def capture(self, step: Step) -> Recording:
        """Record a step; one like it has run before."""
        return record(self._native, self._arena, step)


class DeviceGraph:
    """A graph of an NPU."""

    def __init__(self, graph: Any, result: tuple[Tensor, ...]) -> None:  # noqa: ANN401  torch_npu's
        self._graph = graph
        self.result = result

    def run(self) -> None:
        """Replay it, once nothing writes its inputs any more."""
        stream = torch.npu.current_stream()  # type: ignore[attr-defined]  # by torch_npu
        stream.synchronize()
        self._graph.replay()


class DeviceCapturer:
    """Captures on an NPU, whose library must be loaded."""

    def __init__(self) -> None:
        self._pool = torch.npu.graph_pool_handle()  # type: ignore[attr-defined]  # by torch_npu

    def capture(self, step: Step) -> DeviceGraph:
        """Run a step once so that nothing is left to be set up, then capture it."""
        step()
        torch.npu.synchronize()  # type: ignore[attr-defined]  # by torch_npu
        graph = torch.npu.NPUGraph()  # type: ignore[attr-defined]  # by torch_npu
        with torch.npu.graph(graph, pool=self._pool):  # type: ignore[attr-defined]  # by torch_npu
            result = step()
        return DeviceGraph(graph, result)
