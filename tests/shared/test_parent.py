import os
import signal
import subprocess
import sys
import time

from shared.parent import PARENT_VARIABLE, die_with_parent

CHILD = (
    "from shared.parent import die_with_parent; import time, sys; die_with_parent();"
    "sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(30)"
)
LAUNCHER = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE,
    env={{**os.environ, "{PARENT_VARIABLE}": str(os.getpid())}})
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(30)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_launcher_takes_its_services_along() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    with launcher.stdout:
        child = int(launcher.stdout.readline())
    assert is_running(child)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 15
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def test_a_launcher_that_died_before_counts_too() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, PARENT_VARIABLE: str(gone.pid)}
    child = subprocess.run([sys.executable, "-c", CHILD], env=environment, timeout=60, check=False)
    assert child.returncode == -signal.SIGTERM


def test_without_a_launcher_nothing_happens() -> None:
    assert PARENT_VARIABLE not in os.environ
    die_with_parent()
