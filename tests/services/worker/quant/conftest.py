"""A float checkpoint small enough to be quantized in each test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec

SIZES = {"hidden_size": 64, "q_lora_rank": 64, "num_nextn_predict_layers": 0}


@pytest.fixture(scope="session")
def source(make_checkpoint: Callable[..., Any]) -> Path:
    """Float32, four layers: dense, then sparse; indexers on 0 and 2."""
    path: Path = make_checkpoint(**SIZES).path
    return path


@pytest.fixture(scope="session")
def spec(source: Path) -> ModelSpec:
    config = ModelConfig.from_dir(source)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Longer and shorter than index_topk (16), over more than one block."""
    generator = torch.Generator().manual_seed(5)
    lengths = (40, 7, 150, 25)
    return [torch.randint(0, 97, (size,), generator=generator).tolist() for size in lengths]
