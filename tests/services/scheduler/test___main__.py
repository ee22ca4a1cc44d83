"""The process as the launcher starts it."""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.scheduler.__main__ import main
from shared.process import EXIT_USAGE


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="glm-"))
    yield path
    shutil.rmtree(path)


def test_a_wrong_setting_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--address", "unix:/run/s", "--worker-address", "unix:/run/w", "--max-num-seqs", "0"]
    assert main(flags) == EXIT_USAGE
    error = capsys.readouterr().err
    assert error.startswith("scheduler: --max-num-seqs")
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_process_ends_with_0_after_a_signal(folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-P", "-m", "services.scheduler"]
    command += ["--address", f"unix:{folder}/s", "--worker-address", f"unix:{folder}/w"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "s").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (folder / "s").exists()
        process.send_signal(number)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
