"""Starts a whole mesh for a benchmark, finds its processes and stops it again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVICES = ("frontend", "detokenizer", "scheduler", "worker")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A running mesh: its port, its process ids by service, and the moment it was started."""

    port: int
    pids: dict[str, int]
    started_s: float

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each service so far, user and system."""
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}


def free_port() -> int:
    """A loopback port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running_mesh(*flags: str, timeout_s: float = 120.0) -> Iterator[Mesh]:
    """A mesh started with `glm-mesh up FLAGS`, ready to serve."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "glm-mesh"), "up", "--port", str(port), *flags]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _wait_ready(process, port, started + timeout_s)
        yield Mesh(port=port, pids=_service_pids(process.pid), started_s=started)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def listener_pid(port: int) -> int:
    """The process that listens on a port; of several that share the socket the one that made it."""
    sockets = _listening_sockets(port)
    holders = {pid: parent for pid, parent in _parents().items() if sockets & _sockets_of(pid)}
    makers = [pid for pid, parent in holders.items() if parent not in holders]
    if len(makers) != 1:
        raise RuntimeError(f"port {port}: {len(makers)} processes listen there")
    return makers[0]


def _listening_sockets(port: int) -> set[str]:
    listen = "0A"  # TCP_LISTEN of the kernel
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == listen and int(fields[1].rsplit(":", 1)[1], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def _parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                found[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    return found


def _wait_ready(process: "subprocess.Popen[bytes]", port: int, deadline: float) -> None:
    url = f"http://127.0.0.1:{port}/health"
    while time.perf_counter() < deadline:
        if process.poll() is not None:
            text = process.stderr.read().decode(errors="replace") if process.stderr else ""
            raise RuntimeError(f"glm-mesh up ended with {process.returncode}: {text[-2000:]}")
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise RuntimeError("the mesh was not ready in time")


def _service_pids(launcher: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for pid, parent in _parents().items():
        if parent != launcher:
            continue
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found |= {name: pid for name in SERVICES if f"services.{name}".encode() in words}
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, user and system, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
