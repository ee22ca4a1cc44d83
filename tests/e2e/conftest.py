"""The whole mesh on this machine: one with glm-nano, one in replay mode, each started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mesh import Mesh, running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an end-to-end test."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def nano() -> Iterator[Mesh]:
    """Serves glm-nano in float32, where equal inputs give equal text."""
    yield from running("--dtype", "float32", "--num-threads", "1")


@pytest.fixture(scope="session")
def replayed() -> Iterator[Mesh]:
    """Emits what each request brings."""
    yield from running("--worker", "replay", "--log-level", "debug")
