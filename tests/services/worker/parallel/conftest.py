"""GLM-5.2 and glm-nano by their configurations; processes that are ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.worker.model.config import ModelConfig
from tests.services.worker.parallel.ranks import Ranks

MODELS = Path(__file__).resolve().parents[4] / "models"


@pytest.fixture(scope="session")
def glm() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-5.2")


@pytest.fixture(scope="session")
def nano() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-nano")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Processes for all tests of the session: each imports torch once."""
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.stop()
