"""Compilation of the C kernels."""

from pathlib import Path
from typing import Any

import pytest

from services.worker.ops import build
from services.worker.ops.variants import Variant


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


def test_a_compiler_without_an_instruction_set_still_builds_the_rest(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = Variant(
        name="unknown", options=("-mno-such-set",), flags=frozenset({"x"}), machines=None
    )
    monkeypatch.setattr(build, "VARIANTS", (unknown, *build.VARIANTS))
    assert [path.name for path in build.build_all()][-1] == "glm_portable.so"
    assert "the unknown kernels are left out" in capsys.readouterr().err


def test_a_compiler_that_cannot_build_the_portable_kernels_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Variant(name="broken", options=("-mno-such-set",), flags=frozenset(), machines=None)
    monkeypatch.setattr(build, "VARIANTS", (broken,))
    with pytest.raises(build.BuildError):
        build.build_all()
