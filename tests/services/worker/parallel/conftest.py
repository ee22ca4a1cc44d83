"""GLM-5.2 and glm-nano by their configurations."""

from pathlib import Path

import pytest

from services.worker.model.config import ModelConfig

MODELS = Path(__file__).resolve().parents[4] / "models"


@pytest.fixture(scope="session")
def glm() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-5.2")


@pytest.fixture(scope="session")
def nano() -> ModelConfig:
    return ModelConfig.from_dir(MODELS / "glm-nano")
