"""The environment is made once for the same inputs, and anew when they change."""

import ast
import os
import sys
from pathlib import Path

import pytest

from tools.npu_contract import __main__ as runner
from tools.npu_contract import environment


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to make an environment, in order; nothing is installed."""
    done: list[str] = []

    def note_pip(made: environment.Environment, verb: str, *rest: str) -> None:
        done.append(verb)
        if verb == "download":
            (made.folder / "wheel").mkdir(exist_ok=True)
            (made.folder / "wheel" / "torch_npu-0.whl").touch()

    monkeypatch.setattr(environment, "_pip", note_pip)
    monkeypatch.setattr(environment, "_site_packages", lambda made: made.folder)
    monkeypatch.setattr(environment, "build_stubs", lambda *_: done.append("stubs"))
    monkeypatch.setattr(
        environment.venv,
        "create",
        lambda folder, **_: Path(folder).mkdir(parents=True, exist_ok=True),
    )
    return done


def test_the_second_run_makes_nothing(steps: list[str], tmp_path: Path) -> None:
    environment.prepare(tmp_path)
    assert steps == ["install", "download", "install", "stubs"]
    environment.prepare(tmp_path)
    assert len(steps) == 4


def test_another_lock_makes_it_anew(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.prepare(tmp_path)
    lock = tmp_path / "lock"
    lock.write_text("torch==0")
    monkeypatch.setattr(environment, "LOCK", lock)
    environment.prepare(tmp_path)
    assert len(steps) == 8


def test_what_was_half_made_is_made_again(
    steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment.prepare(tmp_path)
    (tmp_path / "stamp").write_text("old")

    def fail(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(environment, "build_stubs", fail)
    with pytest.raises(OSError):
        environment.prepare(tmp_path)
    assert not (tmp_path / "stamp").exists()


def test_the_child_sees_the_stubs_and_no_cann(steps: list[str], tmp_path: Path) -> None:
    made = environment.prepare(tmp_path)
    own = os.environ.copy() | {"ASCEND_HOME_PATH": "/usr/local/Ascend", "HOME": "/home/me"}
    variables = runner.child_variables(made, own)
    assert "ASCEND_HOME_PATH" not in variables
    assert variables["HOME"] == "/home/me"
    assert variables["LD_LIBRARY_PATH"] == str(tmp_path / "stubs")
    assert variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_what_all_tests_import_is_there() -> None:
    """The contract tests are under tests/ too, so pytest reads its conftest.py there."""
    tree = ast.parse((environment.ROOT / "tests" / "conftest.py").read_text())
    asked = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert asked - set(sys.stdlib_module_names) <= set(environment.PACKAGES)
