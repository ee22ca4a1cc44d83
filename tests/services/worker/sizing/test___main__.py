import json
import os
import subprocess
import sys

import pytest

from services.worker.sizing.__main__ import main
from tests.services.worker.sizing.conftest import MODELS

GLM = ["--model", str(MODELS / "glm-5.2")]
ONE_NODE = [*GLM, "--topology", "dp2,tp8,ep", "--scheme", "w4a8c8"]


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HCCL_BUFFSIZE", "VLLM_PP_LAYER_PARTITION"):
        monkeypatch.delenv(name, raising=False)


def test_zero_says_that_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE_NODE, "--max-model-len", "8192", "--max-num-seqs", "4"]) == 0
    assert "fits: " in capsys.readouterr().out


def test_one_says_that_it_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ONE_NODE, "--max-model-len", "1048576", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "too_small"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--topology", "tp3"], "cannot be cut over tp_size=3"),
        (["--topology", "tp8", "--tensor-parallel-size", "8"], "give one of them"),
        (["--no-such-flag"], "unknown option --no-such-flag"),
        (["--topology", "tp32", "--scheme", "w4a8c8"], "not whole sixteenths"),
    ],
)
def test_two_says_that_the_question_is_wrong(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GLM, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("plan: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_flags_left_out_are_told_beside_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    main([*ONE_NODE, "--max-model-len", "8192", "--port", "8000", "--headless", "--json"])
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert captured.err == "no bearing on memory: --port, --headless\n"


def test_the_command_plans_the_embedded_model_on_a_cpu() -> None:
    command = [sys.executable, "-P", "-m", "services.launcher", "plan", "models/glm-nano"]
    done = subprocess.run(
        [*command, "--hardware", "cpu"],
        cwd=MODELS.parent,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fits: 10 sequences of 8,192 tokens at once" in done.stdout
