"""Runs `glm-mesh up` for a test and looks at it from outside: HTTP, sockets, processes, logs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

SERVICES = ("worker", "scheduler", "detokenizer", "frontend")
READY_LINE = "Ctrl-C stops everything."


class Mesh:
    """One running mesh."""

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        # Not tmp_path: socket paths have to be short.
        self.directory = Path(tempfile.mkdtemp(prefix="gm-"))
        self.run_dir = self.directory / "r"
        command = [
            str(Path(sys.executable).parent / "glm-mesh"),
            *("up", "--port", "0", "--run-dir", str(self.run_dir)),
            *("--served-model-name", "glm-nano", *flags),
        ]
        self._screen: list[str] = []
        self._http = httpx.Client(timeout=60)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            cwd=self.directory,
        )
        self._reader = threading.Thread(target=self._read_screen, daemon=True)
        self._reader.start()
        try:
            self.until(lambda: READY_LINE in self.screen, 90, "the mesh is ready")
        except BaseException:
            self.stop()
            self.remove()
            raise
        self.url: str = self.state()["url"]

    @property
    def screen(self) -> str:
        """What the launcher has shown so far."""
        return "".join(self._screen)

    def state(self) -> dict[str, Any]:
        """The launcher's page of what runs."""
        found: dict[str, Any] = json.loads((self.run_dir / "mesh.json").read_text())
        return found

    def pid(self, service: str) -> int:
        """Process id of a service."""
        return int(self.state()["services"][service]["pid"])

    def pids(self) -> dict[str, int]:
        """Process ids of all services."""
        return {name: self.pid(name) for name in SERVICES}

    def address(self, service: str, kind: str = "address") -> str:
        """Socket of a service; `kind` is address, health_address or admin_address."""
        return str(self.state()["services"][service][kind])

    def log(self, service: str) -> str:
        """Everything a service logged."""
        return (self.run_dir / f"{service}.log").read_text()

    def client(self, **options: Any) -> openai.OpenAI:
        """The SDK, pointed here, without retries of its own."""
        settings: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=self._http, **settings)

    def metric(self, name: str) -> float:
        """Value of a metric, summed over its labels."""
        return sum(self.values(name))

    def values(self, name: str) -> list[float]:
        """Values of a metric, one for each set of labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.split("{")[0].split(" ")[0] == name
        ]
        assert values, f"{name} is not on the page"
        return values

    def until_idle(self) -> None:
        """Wait until no block is in use and nothing runs or waits."""
        self.until(
            lambda: (
                self.metric("vllm:kv_cache_usage_perc") == 0
                and self.metric("vllm:num_requests_running") == 0
                and self.metric("vllm:num_requests_waiting") == 0
            ),
            30,
            "every block is free again",
        )

    def until_serving(self) -> None:
        """Wait until /health says yes."""
        self.until(self.is_serving, 30, "the mesh serves")

    def is_serving(self) -> bool:
        """Whether /health says yes."""
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until `condition` holds."""
        end = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None and READY_LINE not in self.screen:
                self._reader.join(5)  # its last words
                raise AssertionError(self.screen)
            assert time.monotonic() < end, f"not within {limit_s} s: {what}\n{self.screen}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT, limit_s: float = 40) -> int:
        """Stop the launcher; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(limit_s)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._http.close()
            self._reader.join(5)
            if self.process.stdout is not None:
                self.process.stdout.close()
        return code

    def remove(self) -> None:
        """Delete logs and sockets."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _read_screen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._screen.append(line)


def running(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Mesh]:
    """A mesh for a fixture: stopped behind it, and in good order."""
    mesh = Mesh(*flags, environment=environment)
    try:
        yield mesh
    finally:
        code = mesh.stop()
        mesh.remove()
    assert code == 0, mesh.screen


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def replay(text: str, steps: Sequence[int] = (1,)) -> dict[str, Any]:
    """Extra body that makes a replay mesh emit `text`."""
    return {"replay": {"text": text, "tokens_per_step": list(steps)}}
