"""The environment of the contract test, in a folder of its own that git ignores."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from tools.npu_contract.stubs import build_stubs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".npu-contract"
LOCK = ROOT / "requirements.lock"
EXTRA = Path(__file__).parent / "requirements.txt"
PACKAGES = (
    "torch",
    "numpy",
    "PyYAML",
    "safetensors",
    "pydantic-settings",
    "rich",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",  # for tests/conftest.py
)


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with a Python that has torch_npu, its wheel and its stub libraries."""

    folder: Path

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.folder / "venv" / "bin" / "python"

    @property
    def stubs(self) -> Path:
        """Folder of the stub libraries."""
        return self.folder / "stubs"

    @property
    def wheel(self) -> Path:
        """The torch_npu wheel as pip brought it."""
        return next((self.folder / "wheel").glob("torch_npu-*.whl"))


def prepare(folder: Path = FOLDER) -> Environment:
    """Make the environment unless it is there and made from the same files."""
    environment = Environment(folder)
    stamp, inputs = folder / "stamp", digest()
    if stamp.exists() and stamp.read_text() == inputs:
        return environment
    print("making the environment of the contract test (a minute or two)", flush=True)
    stamp.unlink(missing_ok=True)
    venv.create(folder / "venv", with_pip=True, clear=True)
    _pip(environment, "install", "-c", str(LOCK), *PACKAGES)
    _pip(environment, "download", "--no-deps", "-d", str(folder / "wheel"), "-r", str(EXTRA))
    _pip(environment, "install", "--no-deps", str(environment.wheel))
    environment.stubs.mkdir(exist_ok=True)
    build_stubs(_site_packages(environment), environment.stubs)
    stamp.write_text(inputs)
    return environment


def digest() -> str:
    """Changes with everything the environment is made from."""
    files = (LOCK, EXTRA, Path(__file__), Path(__file__).parent / "stubs.py")
    text = sys.version.encode() + b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()


def _pip(environment: Environment, *arguments: str) -> None:
    options = ("--disable-pip-version-check", "--no-input", "-q")
    command = [str(environment.python), "-m", "pip", *options, *arguments]
    subprocess.run(command, check=True, stderr=None)


def _site_packages(environment: Environment) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    found = subprocess.run(
        [str(environment.python), "-c", code], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())
