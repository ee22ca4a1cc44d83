"""What a frame costs, of any server on a port."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.load import LoadSpec
from benchmarks.mesh import cpu_seconds, listener_pid
from benchmarks.sse import measure

LISTENER = """
import socket, sys, os, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
if os.fork():  # the engine of a peer may hold the socket that it was born with
    os.wait()
else:
    sys.stdin.read()
"""
NUM_FRAMES = 5
FRAME = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\n\r\n" + FRAME * (NUM_FRAMES - 1) + USAGE + b"data: [DONE]\n\n"


def test_the_process_behind_a_port_is_the_one_that_opened_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert listener_pid(int(process.stdout.readline())) == process.pid
        process.communicate("")


def test_a_port_without_a_listener_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listener_pid(port) == os.getpid()
    with pytest.raises(RuntimeError, match=f"port {port}: 0 processes"):
        listener_pid(port)


def test_processor_time_is_that_of_all_threads() -> None:
    before = cpu_seconds(os.getpid())

    def spin() -> None:
        sum(range(5_000_000))

    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    assert cpu_seconds(os.getpid()) > before


@pytest.fixture
def port() -> Iterator[int]:
    """A server that gives everybody the same five frames."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    client.recv(1 << 16)
                    client.sendall(ANSWER)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def test_a_frame_costs_what_its_processes_used_for_all_frames(port: int) -> None:
    readings = iter([{"a": 1.0, "b": 5.0}, {"a": 1.3, "b": 5.1}])
    spec = LoadSpec(port=port, model="m", concurrency=2, num_requests=8)
    line: dict[str, Any] = measure(spec, lambda: next(readings))
    assert (line["frames"], line["errors"]) == (8 * NUM_FRAMES, 0)
    assert line["us_per_frame_by_process"] == {"a": 7500.0, "b": 2500.0}
    assert line["us_per_frame"] == 10_000.0
    assert line["frames_per_core_s"] == 100
