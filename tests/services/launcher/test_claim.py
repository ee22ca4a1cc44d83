import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from services.launcher import claim as module
from services.launcher.claim import LOCK_FILE, claim
from services.launcher.run_dir import make_run_directory
from services.launcher.up import run_up
from shared.errors import ConfigError

HOLD = (
    "import sys, time; from pathlib import Path; from services.launcher.claim import claim\n"
    "with claim(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
)


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Another process that holds the directory."""
    root = str(Path(__file__).resolve().parents[3])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_second_mesh_is_refused_and_touches_nothing_of_the_first(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    made = make_run_directory(tmp_path)
    made.write_state("http://h:1", {"worker": holder.pid})
    made.make_shared_paths()
    (made.metrics_path() / "counter_1.db").write_text("counts")
    (tmp_path / "scheduler.sock").touch()
    made.response_store_path().touch()
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    try:
        with pytest.raises(ConfigError, match=rf"a mesh runs there \(launcher pid {holder.pid}\)"):
            run_up(["--port", "0", "--api-server-count", "2", "--run-dir", str(tmp_path)])
    finally:
        end(holder)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_what_a_killed_launcher_left_is_taken_over(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    end(holder)
    assert (tmp_path / LOCK_FILE).read_text() == f"{holder.pid}\n"
    with claim(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_free_again_and_may_be_gone_with_its_mesh(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            claim(tmp_path),
            pytest.raises(ConfigError, match=f"pid {os.getpid()}"),
            claim(tmp_path),
        ):
            pass
    gone = make_run_directory(None)
    with claim(gone.path):
        gone.clean(keep_logs=False)
    assert not gone.path.exists()


def test_a_lock_that_was_removed_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / LOCK_FILE
    taken: list[int] = []
    flock = module.fcntl.flock

    def remove_first(held: int, how: int) -> None:
        flock(held, how)
        taken.append(held)
        if len(taken) == 1:
            lock.unlink()

    monkeypatch.setattr(module.fcntl, "flock", remove_first)
    with claim(tmp_path):
        assert len(taken) == 2
        assert lock.exists()


def test_services_of_a_killed_launcher_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(where: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", where])

    def end_it(line: str) -> None:
        told.append(line)
        end(ends)

    ends, stays = start(f"unix:{tmp_path}/worker.sock"), start(f"unix:{tmp_path}/s.sock")
    other = start("unix:/elsewhere/worker.sock")  # the number of an old one came round
    made = make_run_directory(tmp_path)
    made.write_state("u", {"worker": ends.pid, "scheduler": other.pid})
    began = time.monotonic()
    told: list[str] = []
    try:
        with claim(tmp_path, end_it):
            assert told == [f"services of an earlier mesh end (pid {ends.pid}); waiting for them"]
            assert ends.poll() is not None or not module._serves_in(tmp_path, ends.pid)
        made.write_state("u", {"scheduler": stays.pid})
        monkeypatch.setattr(module, "LEFTOVER_LIMIT_S", 0.2)
        with (
            pytest.raises(ConfigError, match=rf"still run there \(pid {stays.pid}\)"),
            claim(tmp_path),
        ):
            pass
    finally:
        for process in (ends, stays, other):
            process.kill()
            process.wait()
    assert time.monotonic() - began < 30


def test_a_directory_that_cannot_be_locked_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"up\.lock: Is a directory"), claim(tmp_path):
        pass
