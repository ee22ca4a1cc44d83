from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec


@pytest.fixture
def spec(tiny_values: dict[str, Any]) -> ModelSpec:
    """A model of 512 positions."""
    config = ModelConfig.from_dict(tiny_values)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("longest", "expected"), [(None, 512), (1, 128), (128, 128), (129, 256), (512, 512)]
)
def test_positions_are_those_of_the_blocks_of_a_longest_sequence(
    spec: ModelSpec, longest: int | None, expected: int
) -> None:
    assert replace(spec, max_model_len=longest).num_positions == expected


def test_rotary_tables_cover_what_is_served(spec: ModelSpec) -> None:
    """GLM-5.2's own million positions take 256 MiB, whatever is served of them."""
    decoder = Decoder.build(replace(spec, max_model_len=200))
    cosines, _ = decoder.rotary.at(torch.arange(256))
    assert cosines.shape == (256, 1, 1, 64)
    with pytest.raises(IndexError):
        decoder.rotary.at(torch.tensor([256]))


def test_served_positions_turn_as_they_do_in_longer_tables(
    spec: ModelSpec,
) -> None:
    long, short = Decoder.build(spec), Decoder.build(replace(spec, max_model_len=100))
    at = torch.arange(128)
    for ours, theirs in zip(short.rotary.at(at), long.rotary.at(at), strict=True):
        assert torch.equal(ours, theirs)
