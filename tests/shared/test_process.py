import asyncio
import os
import signal
from typing import ClassVar

import pytest
from pydantic import Field

from shared.config import ServiceSettings
from shared.errors import CheckpointError
from shared.process import EXIT_USAGE, run_process

ARGV = ["--address", "unix:/run/x.sock"]


class Settings(ServiceSettings):
    """Settings of a service in this test."""

    service: ClassVar[str] = "tester"

    max_num_seqs: int = Field(default=256, gt=0, description="Most sequences in one plan.")


async def return_at_once(settings: Settings, stop: asyncio.Event) -> None:
    assert settings.address == ARGV[1]


def test_a_service_that_returns_ends_with_0() -> None:
    assert run_process(Settings, return_at_once, ARGV) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_service_to_stop(number: signal.Signals) -> None:
    stopped: list[bool] = []

    async def serve(settings: Settings, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(10):
            await stop.wait()
        stopped.append(True)

    assert run_process(Settings, serve, ARGV) == 0
    assert stopped == [True]


def test_mistakes_end_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(settings: Settings, stop: asyncio.Event) -> None:
        raise CheckpointError("tokenizer.json: is missing")

    assert run_process(Settings, return_at_once, [*ARGV, "--max-num-seqs", "0"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("tester: --max-num-seqs '0'")
    assert run_process(Settings, serve, ARGV) == EXIT_USAGE
    assert capsys.readouterr().err == "tester: tokenizer.json: is missing\n"


def test_what_is_no_mistake_of_the_user_is_not_hidden() -> None:
    async def serve(settings: Settings, stop: asyncio.Event) -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run_process(Settings, serve, ARGV)


def test_a_variable_that_nobody_reads_is_logged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLM_MESH_TESTER_MAX_NUM_SEQ", "4")
    assert run_process(Settings, return_at_once, ARGV) == 0
    err = capsys.readouterr().err
    assert " WARNING " in err
    assert "did you mean GLM_MESH_TESTER_MAX_NUM_SEQS?" in err
