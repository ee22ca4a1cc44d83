"""The compiled kernels that operators call, without which nothing is recorded."""

import pytest

from services.worker.graphs.arena import Arena
from services.worker.ops import build, native


@pytest.fixture
def library() -> native.Native:
    build.build_all()
    found = native.load()
    assert found is not None
    return found


@pytest.fixture
def arena() -> Arena:
    return Arena()
