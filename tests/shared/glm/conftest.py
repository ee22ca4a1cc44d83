from pathlib import Path

import pytest

from shared.glm.dialect import Dialect

NANO = Path(__file__).parents[3] / "models" / "glm-nano"


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    return NANO


@pytest.fixture(scope="session")
def dialect() -> Dialect:
    return Dialect.load(NANO)
