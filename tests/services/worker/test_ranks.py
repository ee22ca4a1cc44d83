"""What ranks change about an executor; whole replicas are in parallel/test_world_rank.py."""

from typing import Any

import pytest
import torch

from services.worker.dummy import dummy_step
from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod, MoeRules
from services.worker.ranks import Alone, Together
from tests.services.worker.parallel.test_seat import FakeWorld, make_seat
from tests.services.worker.plans import make_capacity


@pytest.fixture
def spec(tiny_values: dict[str, Any]) -> ModelSpec:
    from services.worker.model.config import ModelConfig

    config = ModelConfig.from_dict(tiny_values)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


def test_a_rank_alone_changes_nothing(spec: ModelSpec) -> None:
    alone, limits, executor = Alone(), make_capacity(), object()
    step = dummy_step(1, 2, spec.device)[1]
    assert alone.place(spec) is spec
    assert alone.agree(limits, spec) is limits
    assert alone.traffic(spec, step) == [step]
    assert alone.finish(executor) is executor  # type: ignore[arg-type,comparison-overlap]  # a marker
    alone.wait_for_others(lambda: False)


def test_limits_are_those_of_the_rank_with_the_fewest_blocks(spec: ModelSpec) -> None:
    class OtherBlocks(FakeWorld):
        def gather(self, topic: str, text: str, **named: Any) -> list[str]:
            return ["17", text] if topic == "blocks" else [text, text]

    limits = Together(make_seat(OtherBlocks(), data_parallel_rank=1)).agree(make_capacity(), spec)
    assert limits.num_blocks == 17
    assert (limits.data_parallel_size, limits.data_parallel_rank) == (2, 1)
    assert limits.moe_ladder == ((32, MoeMethod.ALLGATHER),)


def test_a_world_of_one_replica_needs_no_ticks(spec: ModelSpec) -> None:
    seat = make_seat(FakeWorld(), data_parallel_size=1)
    limits = Together(seat).agree(make_capacity(), spec)
    assert (limits.data_parallel_size, limits.moe_ladder) == (1, ())


def test_a_start_tries_every_method_that_steps_take(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = make_seat(FakeWorld())
    rules = MoeRules(
        hardware="a3", ep_size=4, tp_size=2, num_experts=8, num_experts_per_tok=2, mc2_tokens=4
    )
    monkeypatch.setattr(type(seat), "rules", lambda self, spec: rules)
    step = dummy_step(2, 3, spec.device)[1]
    found = Together(seat).traffic(seat.place(spec), step)
    kinds = [(one.traffic.method, one.traffic.num_tokens) for one in found if one.traffic]
    assert kinds == [(MoeMethod.MC2, 6), (MoeMethod.ALLTOALL, 6)]
    # Without spread experts there is one way.
    assert Together(seat).traffic(spec, step) == [step]
