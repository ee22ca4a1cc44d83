from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.parallel.groups import Groups
from services.worker.parallel.moe_method import MoeMethod
from services.worker.parallel.rendezvous import JoinError
from services.worker.parallel.seat import Seat, Seating
from services.worker.parallel.topology import Rank
from services.worker.runner import BuildStoppedError, WorldLostError
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError


def make_settings(**flags: Any) -> WorkerSettings:
    values = {
        "address": "unix:/x",
        "model": Path("m"),
        "tensor_parallel_size": 2,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "rendezvous": "file:///tmp/x",
        "max_num_seqs": 12,
    }
    return WorkerSettings(**(values | flags))


class FakeWorld:
    """Another rank says `other` of everything."""

    def __init__(self, other: str = "") -> None:
        self.other = other
        self.groups = Groups()
        rank = Rank(dp_rank=1, pp_rank=0, tp_rank=1)
        self.membership = SimpleNamespace(rank=rank, hccl_mib=200)
        self.is_missing = False

    def gather(self, topic: str, text: str, *, timeout_s: float, is_stopping: Any) -> list[str]:
        if self.is_missing:
            assert is_stopping()
            raise JoinError("missing")
        return [self.other or text, text]


def make_seat(world: Any, verdict: str = "", **flags: Any) -> Seat:
    watch: Any = SimpleNamespace(verdict=verdict)
    return Seat(settings=make_settings(**flags), world=world, watch=watch)


@pytest.fixture
def spec(glm: ModelConfig) -> ModelSpec:
    return ModelSpec(config=glm, dtype=torch.bfloat16, device=torch.device("meta"))


def test_a_seat_is_a_part_of_the_model_and_its_groups(spec: ModelSpec) -> None:
    world = FakeWorld()
    placed = make_seat(world).place(spec)
    assert (placed.placement.tp_rank, placed.placement.ep_rank) == (1, 3)
    assert (placed.placement.tp_size, placed.placement.ep_size) == (2, 4)
    assert placed.groups is world.groups


def test_a_device_chooses_methods_and_a_cpu_is_told(spec: ModelSpec) -> None:
    on_a3 = make_seat(FakeWorld(), num_speculative_tokens=1).rules(
        ModelSpec(**{**_fields(spec), "cache": CacheFormat(generation="a3")})
    )
    assert (on_a3.hardware, on_a3.ep_size, on_a3.tp_size) == ("a3", 4, 2)
    assert on_a3.choose(24) is MoeMethod.MC2
    assert on_a3.choose(25) is MoeMethod.ALLTOALL
    # The largest step that is captured; a full one if none is.
    few = make_seat(FakeWorld(), num_speculative_tokens=1, cudagraph_capture_sizes=(8, 10))
    assert few.rules(spec).choose(10) is MoeMethod.MC2
    assert few.rules(spec).choose(11) is MoeMethod.ALLTOALL
    eager = make_seat(FakeWorld(), num_speculative_tokens=1, enforce_eager=True)
    assert eager.rules(spec).capacity == 24
    narrow = FakeWorld()
    narrow.membership.hccl_mib = 40
    # 2 x (64 experts x 4 ranks x 12,800 + 9 x 12,288) bytes, 6.5 MiB, for each token of a rank.
    assert make_seat(narrow).rules(spec).capacity == 12
    on_cpu = ModelSpec(**{**_fields(spec), "device": torch.device("cpu")})
    assert make_seat(FakeWorld()).rules(on_cpu).choose(1) is MoeMethod.ALLGATHER
    forced = make_seat(FakeWorld(), moe_comm_method="alltoall").rules(on_cpu)
    assert forced.choose(1) is MoeMethod.ALLTOALL


def _fields(spec: ModelSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ModelSpec.__slots__}


def test_the_smallest_number_of_all_ranks_holds() -> None:
    assert make_seat(FakeWorld("7")).least("blocks", 9) == 7
    assert make_seat(FakeWorld("11")).least("blocks", 9) == 9


def test_ranks_that_agree_go_on_and_others_are_told_in_what(spec: ModelSpec) -> None:
    make_seat(FakeWorld()).agree(spec, {"model": "abc"})
    other = FakeWorld()
    texts: list[str] = []

    def gather(topic: str, text: str, **_: Any) -> list[str]:
        texts.append(text)
        return [text.replace('"abc"', '"xyz"'), text]

    other.gather = gather  # type: ignore[method-assign]  # a fake
    with pytest.raises(ConfigError, match="model is xyz on rank 0 and something else on rank 1"):
        make_seat(other).agree(spec, {"model": "abc"})
    assert '"max_num_seqs": 12' in texts[0]


@pytest.mark.parametrize(
    ("verdict", "error"), [("rank 1 failed", WorldLostError), ("", BuildStoppedError)]
)
def test_waiting_ends_with_the_world_or_the_process(verdict: str, error: type[Exception]) -> None:
    world = FakeWorld()
    world.is_missing = True
    with pytest.raises(error):
        make_seat(world, verdict).wait_for_others("loaded", lambda: True)


def test_a_seat_that_was_not_taken_is_left_in_peace() -> None:
    seating = Seating(make_settings())
    assert seating.verdict == ""
    seating.fail("too early for anybody to hear")
    seating.leave()
