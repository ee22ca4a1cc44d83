"""Prepares the environment and runs the contract tests in it; further arguments go to pytest.

Without a file or folder among them all contract tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tools.npu_contract.environment import ROOT, Environment, prepare

_MODEL = "tests/services/worker/model"
_MODULES = (
    "attention",
    "experts",
    "experts_int8",
    "indexer",
    "key_cache",
    "latent_cache",
    "linear_int8",
    "mlp",
)
TESTS = (
    "tests/npu_contract",
    "tests/services/worker/ops",
    *(f"{_MODEL}/test_{name}.py" for name in _MODULES),
)
"""What is about the wheel, and numeric tests of our kernels and of the modules that call them."""


def main(arguments: list[str]) -> int:
    """Pytest's exit code."""
    environment = prepare()
    command = [str(environment.python), "-m", "pytest", "-q", "-p", "tools.npu_contract.plugin"]
    variables = child_variables(environment, os.environ)
    names_tests = any((ROOT / argument.split("::")[0]).exists() for argument in arguments)
    command += arguments if names_tests else [*arguments, *TESTS]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


def child_variables(environment: Environment, own: Mapping[str, str]) -> dict[str, str]:
    """The variables under which torch_npu imports without CANN."""
    # A real CANN must not answer in place of the stubs, and torch must not load torch_npu by
    # itself: the tests import it first, as the worker does on an NPU.
    kept = {name: value for name, value in own.items() if name != "ASCEND_HOME_PATH"}
    return kept | {
        "LD_LIBRARY_PATH": str(environment.stubs),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCH_NPU_WHEEL": str(environment.wheel),
        "OMP_NUM_THREADS": "1",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
