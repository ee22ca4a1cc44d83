"""Processes that stay for many cases: importing torch costs more than most cases do."""

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[4]
_CASES = "tests.services.worker.parallel"


class Ranks:
    """A set of processes, the first ones of which take part in a case."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        self._num_cases = 0

    def run(
        self,
        count: int,
        case: str,
        *,
        timeout_s: float = 90,
        lost: Collection[int] = (),
        **arguments: Any,
    ) -> list[Any]:
        """What each of `count` ranks returns from `module:function`; None of `lost` ones.

        Ranks that are lost take the others' world with them: all are started anew afterwards.
        """
        self._num_cases += 1
        while len(self._processes) < count:
            self._processes.append(self._start(len(self._processes)))
        files = [self._folder / f"{self._num_cases}.{rank}" for rank in range(count)]
        for process, file in zip(self._processes, files, strict=False):
            order = {
                "case": f"{_CASES}.{case}",
                "rendezvous": f"file://{self._folder}/meeting-{self._num_cases}",
                "arguments": arguments,
                "results": str(file),
            }
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        waited = [rank for rank in range(count) if rank not in lost]
        errors = self._wait(waited, timeout_s)
        if lost or any(errors.values()):
            self.stop()  # they wait for each other
        assert not any(errors.values()), "\n".join(f"rank {at}: {e}" for at, e in errors.items())
        return [
            None if rank in lost else torch.load(file, weights_only=False)
            for rank, file in enumerate(files)
        ]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", f"{_CASES}.rank_main", str(rank)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _wait(self, waited: list[int], timeout_s: float) -> dict[int, str]:
        deadline = time.monotonic() + timeout_s
        errors = dict.fromkeys(waited, f"no answer within {timeout_s} s")
        with selectors.DefaultSelector() as selector:
            for rank in waited:
                stdout = self._processes[rank].stdout
                assert stdout is not None
                selector.register(stdout, selectors.EVENT_READ, rank)
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(deadline - time.monotonic()):
                    line = key.fileobj.readline()  # type: ignore[union-attr]  # a pipe
                    errors[key.data] = json.loads(line)["error"] if line else "the process ended"
                    selector.unregister(key.fileobj)
        return errors

    def stop(self) -> None:
        """End all; the next case starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        self._processes.clear()
