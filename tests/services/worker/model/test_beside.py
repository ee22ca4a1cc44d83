"""Work on a second stream: what waits for what, told by streams that note their calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from services.worker.model.beside import InLine, SecondStream
from services.worker.model.experts import MixtureOfExperts
from services.worker.model.experts_parallel import ExpertParallelMixture
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream
from tests.services.worker.model.exchanges import fill_block, step_of


class Tracked(torch.Tensor):
    """A tensor that notes which streams use it."""

    log: list[str]

    @staticmethod
    def of(x: torch.Tensor, name: str, log: list[str]) -> "Tracked":
        found: Any = x.as_subclass(Tracked)
        found.name_, found.log = name, log
        return found

    def record_stream(self, stream: Any) -> None:
        self.log.append(f"{self.name_} is used by {stream.name}")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, stream: "FakeStream") -> None:
        self._log.append(f"{self.name} waits for {stream.name}")


class FakeStreams:
    """What torch_npu adds to torch, as far as streams go."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = FakeStream("first", self.log)

    def Stream(self) -> FakeStream:
        return FakeStream("second", self.log)

    def current_stream(self) -> FakeStream:
        return self._current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


def test_a_second_stream_begins_behind_the_first_and_is_waited_for() -> None:
    streams = FakeStreams()
    log = streams.log
    x, result = (Tracked.of(torch.ones(2), name, log) for name in ("x", "result"))

    def work(given: torch.Tensor) -> torch.Tensor:
        assert given is x
        log.append(f"work on {streams.current_stream().name}")
        return result

    wait = SecondStream(streams).start(work, x)
    log.append(f"go on with {streams.current_stream().name}")
    assert wait() is result
    assert log == [
        "second waits for first",
        "work on second",
        # Its memory may not be given to others before the second stream is through with it.
        "x is used by second",
        "go on with first",
        "first waits for second",
        "result is used by first",
    ]


def test_a_host_does_it_at_once() -> None:
    seen = []
    wait = InLine().start(lambda x: seen.append(1) or x + 1, torch.ones(1))
    assert seen == [1]
    assert wait().tolist() == [2]


class Noting:
    """Does work in line, and notes when it is started and wanted."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, work: Any, x: torch.Tensor) -> Any:
        self.log.append("started")
        result = work(x)

        def wait() -> torch.Tensor:
            self.log.append("wanted")
            return result

        return wait


def noted(gate: Any, log: list[str]) -> Any:
    def route(x: torch.Tensor) -> Any:
        log.append("routed")
        return gate(x)

    return route


def test_shared_experts_are_started_before_routed_ones_and_wanted_after_them(
    spec: ModelSpec,
) -> None:
    for block_type, placement in (
        (MixtureOfExperts, Placement()),
        (ExpertParallelMixture, Placement(ep_size=2)),
    ):
        noting = Noting()
        block: Any = block_type(replace(spec, beside=noting, placement=placement), "mlp.")
        fill_block(block)
        route = noted(block.gate, noting.log)
        block.gate = route
        for exchange in getattr(block, "_exchanges", {}).values():
            exchange._gate = route
        x = torch.randn(5, spec.config.hidden_size)
        found = block(x, step_of(Stream.alone(5)))
        assert noting.log == ["started", "routed", "wanted"]
        plain: Any = block_type(replace(spec, placement=placement), "mlp.")
        fill_block(plain)
        assert torch.equal(found, plain(x, step_of(Stream.alone(5))))
