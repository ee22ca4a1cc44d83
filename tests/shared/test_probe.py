from pathlib import Path

import pytest

from shared import probe as module
from shared.health import HealthThread
from shared.probe import main


def test_exit_code_follows_the_health(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = module.probe

    async def patient(address: str, service: str) -> str:
        """However long this process takes to connect."""
        while (answer := await probe(address, service=service, timeout_s=60.0)) == "UNREACHABLE":
            pass
        return answer

    address = f"unix:{tmp_path}/h"
    assert main([address]) == 1
    monkeypatch.setattr(module, "probe", patient)
    thread = HealthThread(address=address, service="worker")
    thread.start()
    assert main([address]) == 1
    thread.set_status(True)
    assert main([address]) == 0
    assert main([address, "worker"]) == 0
    thread.stop()
    assert capsys.readouterr().out.split() == [
        "UNREACHABLE",
        "NOT_SERVING",
        "SERVING",
        "SERVING",
    ]


def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["nowhere"]) == 2
    assert "usage" in capsys.readouterr().err
