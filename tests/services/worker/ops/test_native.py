"""The choice among the compiled builds, and what a kernel's status becomes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.ops import native
from services.worker.ops.variants import VARIANTS, cpu_flags


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_the_best_build_this_cpu_runs_is_loaded(compiled: dict[str, Any]) -> None:
    loaded = native.load()
    assert loaded is not None
    best = next(v for v in VARIANTS if v.is_buildable and v.flags <= cpu_flags())
    assert loaded.path.name == f"glm_{best.name}.so"


def test_a_cpu_without_the_flags_takes_the_portable_build(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_flags", frozenset)
    loaded = native.load()
    assert loaded is not None
    assert loaded.path.name == "glm_portable.so"


def test_without_a_build_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "library_path", lambda variant: tmp_path / variant.name)
    assert native.load() is None


def test_an_index_outside_its_tensor_becomes_an_error(compiled: dict[str, Any]) -> None:
    library = next(iter(compiled.values()))
    with pytest.raises(ValueError, match="outside its tensor"):
        library.call(
            "scatter_rows", torch.float32, 1, 4, 4, 2, torch.tensor([2]), torch.zeros(4),
            torch.zeros(8),
        )  # fmt: skip
