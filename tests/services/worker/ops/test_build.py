"""Compilation of the C kernels, and the choice among the builds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.ops import build, native
from services.worker.ops.variants import VARIANTS, Variant, cpu_flags


def test_a_second_build_compiles_nothing(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> Path:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "build", refuse)
    assert build.build_all()


def test_a_missing_compiler_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert build.main() == 1
    assert "no C compiler" in capsys.readouterr().err


def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    broken = Variant(name="broken", options=("-no-such-option",), flags=frozenset(), machines=None)
    with pytest.raises(build.BuildError, match="no-such-option"):
        build.build(broken, "gcc")


def test_every_cpu_runs_some_build() -> None:
    assert VARIANTS[-1].flags == frozenset()
    assert VARIANTS[-1].machines is None


def test_the_best_build_this_cpu_runs_is_loaded(compiled: dict[str, Any]) -> None:
    native.load.cache_clear()
    loaded = native.load()
    assert loaded is not None
    best = next(v for v in VARIANTS if v.is_buildable and v.flags <= cpu_flags())
    assert loaded.path.name == f"glm_{best.name}.so"


def test_without_a_build_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "library_path", lambda variant: tmp_path / variant.name)
    native.load.cache_clear()
    assert native.load() is None
    native.load.cache_clear()


def test_a_kernel_status_becomes_an_error(compiled: dict[str, Any]) -> None:
    library = next(iter(compiled.values()))
    with pytest.raises(ValueError, match="outside its tensor"):
        library.call(
            "scatter_rows", torch.float32, 1, 4, 4, 2, torch.tensor([2]), torch.zeros(4),
            torch.zeros(8),
        )  # fmt: skip
