"""The model against a real torch_npu wheel; needs the wheel's path in TORCH_NPU_WHEEL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.worker.ops.schemas import SCHEMAS, TORCH_NPU_VERSION
from tools import npu_schemas

ROOT = Path(__file__).parents[2]
WHEEL = os.environ.get("TORCH_NPU_WHEEL")
needs_wheel = pytest.mark.skipif(WHEEL is None, reason="TORCH_NPU_WHEEL names no wheel")


@needs_wheel
def test_schemas_and_steps_pass_the_real_wheel() -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "npu_contract.py"), str(WHEEL)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(SCHEMAS)} schemas equal" in result.stdout
    assert "a step on meta" in result.stdout
    assert "a step on cpu" in result.stdout


@needs_wheel
def test_pinned_schemas_are_those_of_the_wheel() -> None:
    assert npu_schemas.find_schemas(Path(str(WHEEL))) == SCHEMAS


def test_the_dump_covers_the_pinned_operators() -> None:
    assert set(npu_schemas.OPERATORS) == SCHEMAS.keys()


def test_the_dump_writes_a_module_that_holds_the_schemas() -> None:
    namespace: dict[str, object] = {}
    exec(npu_schemas.render(TORCH_NPU_VERSION, dict(SCHEMAS)), namespace)
    assert namespace["SCHEMAS"] == SCHEMAS
    assert namespace["TORCH_NPU_VERSION"] == TORCH_NPU_VERSION
