"""Graphs of a device by a stand-in for its library, which the contract tests check the names of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.graphs.capture import DeviceCapturer, HostCapturer
from services.worker.ops.native import Native


class FakeNpu:
    """Takes note of what is asked of it, in order."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.pools = 0

    def graph_pool_handle(self) -> object:
        self.pools += 1
        return ("pool", self.pools)

    def NPUGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.told.append("replay"))

    def graph(self, graph: object, *, pool: object) -> Any:
        npu = self

        class Capturing:
            def __enter__(self) -> None:
                npu.told.append(("begin", pool))

            def __exit__(self, *error: object) -> None:
                npu.told.append("end")

        return Capturing()

    def synchronize(self) -> None:
        self.told.append("wait for device")

    def current_stream(self) -> Any:
        return SimpleNamespace(synchronize=lambda: self.told.append("wait for stream"))


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    monkeypatch.setattr(torch, "npu", fake, raising=False)
    return fake


def test_a_device_step_runs_once_before_it_is_captured(npu: FakeNpu) -> None:
    capturer = DeviceCapturer()
    result = torch.zeros(1)

    def step() -> tuple[Tensor, ...]:
        npu.told.append("step")
        return (result,)

    captured = capturer.capture(step)
    pool = ("pool", 1)
    assert npu.told == ["step", "wait for device", ("begin", pool), "step", "end"]
    assert captured.result[0] is result
    capturer.capture(step)
    assert ("begin", pool) in npu.told[5:]
    assert npu.pools == 1


def test_a_replay_waits_until_nothing_writes_its_inputs(npu: FakeNpu) -> None:
    captured = DeviceCapturer().capture(lambda: ())
    npu.told.clear()
    captured.run()
    assert npu.told == ["wait for stream", "replay"]


def test_an_error_while_capturing_ends_the_capture(npu: FakeNpu) -> None:
    calls: list[int] = []

    def step() -> tuple[Tensor, ...]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not while capturing")
        return ()

    with pytest.raises(RuntimeError, match="not while capturing"):
        DeviceCapturer().capture(step)
    assert npu.told[-1] == "end"


def test_steps_of_a_host_share_memory(library: Native) -> None:
    x, weight = torch.ones(2, 8), torch.ones(8, 8)
    capturer = HostCapturer(library)
    with torch.inference_mode():
        captured = [
            capturer.capture(lambda n=n: (torch.ops.glm.linear(x[:n], weight),)) for n in (2, 1)
        ]
    assert captured[0].result[0].data_ptr() == captured[1].result[0].data_ptr()
    captured[0].run()
    assert captured[0].result[0].eq(8).all()
