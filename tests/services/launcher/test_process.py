import asyncio
import os
import sys
from pathlib import Path

import pytest

from services.launcher.commands import Command
from services.launcher.log_tail import LogTail
from services.launcher.process import ServiceProcess, describe_exit


def process(tmp_path: Path, code: str) -> ServiceProcess:
    command = Command(
        service="worker", argv=(sys.executable, "-c", code), environment=dict(os.environ)
    )
    return ServiceProcess(command, LogTail(tmp_path / "worker.log"))


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_both_streams_go_to_the_log_and_the_exit_code_is_known(tmp_path: Path) -> None:
    child = process(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); exit(3)")
    await child.start()
    assert await child.wait() == 3
    assert not child.is_running
    assert sorted(child.tail.last_lines(5)) == ["err", "out"]
    assert child.tail.path.stat().st_mode & 0o077 == 0


async def test_it_does_not_share_the_launchers_session(tmp_path: Path) -> None:
    child = process(tmp_path, "import time; time.sleep(30)")
    await child.start()
    assert os.getsid(child.pid) == child.pid
    assert await child.stop(30)


async def test_a_deaf_child_is_killed_with_its_own_children(tmp_path: Path) -> None:
    child = process(
        tmp_path,
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print(subprocess.Popen(['sleep', '30']).pid, flush=True)\n"
        "time.sleep(30)",
    )
    await child.start()
    while not child.tail.last_lines(1):
        assert child.is_running
        await asyncio.sleep(0.02)
    grandchild = int(child.tail.last_lines(1)[0])
    assert not await child.stop(0.2)
    assert not child.is_running
    for _ in range(750):
        if not is_running(grandchild):
            break
        await asyncio.sleep(0.02)
    assert not is_running(grandchild)


async def test_stopping_what_has_ended_is_fine(tmp_path: Path) -> None:
    child = process(tmp_path, "")
    assert await child.stop(1)
    await child.start()
    await child.wait()
    assert await child.stop(1)
    child.kill()


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_exit_codes_are_put_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
