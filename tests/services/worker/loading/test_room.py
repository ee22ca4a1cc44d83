"""Memory in the place of what the machine has: a number."""

from typing import Any

import pytest
import torch

from services.worker.loading import room
from services.worker.loading.room import check_room
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.sizing.weights import weigh_rank
from shared.errors import ConfigError


@pytest.fixture
def spec(tiny_values: dict[str, Any]) -> ModelSpec:
    config = ModelConfig.from_dict(tiny_values)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


def test_weights_that_do_not_fit_are_told_with_both_numbers(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weigh_rank(spec).total
    monkeypatch.setattr(room, "free_host_bytes", lambda: weights)
    check_room(spec)
    monkeypatch.setattr(room, "free_host_bytes", lambda: weights - 1)
    with pytest.raises(ConfigError, match=rf"{weights} bytes \(.*{weights - 1} bytes \(.*plan"):
        check_room(spec)


def test_free_memory_that_is_not_known_stops_nothing(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_host_bytes", lambda: None)
    check_room(spec)


def test_a_model_of_a_terabyte_is_refused_before_its_memory_is_taken(
    tiny_values: dict[str, Any],
) -> None:
    """All sizes are within their bounds, and no machine has room for their product."""
    huge = {"hidden_size": 1 << 17, "n_routed_experts": 1 << 10, "moe_intermediate_size": 1 << 16}
    config = ModelConfig.from_dict(tiny_values | huge)
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"the weights of this rank take \d+ bytes"):
        check_room(spec)


def test_the_memory_of_a_device_is_asked_of_the_device(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    device = torch.device("cuda:0")

    def info(of: torch.device) -> tuple[int, int]:
        asked.append(of)
        return 10, 100

    monkeypatch.setattr(torch.accelerator, "get_memory_info", info)
    assert room._free_bytes(device) == 10
    assert asked == [device]
