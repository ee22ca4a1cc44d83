"""What `make eval` starts, and how two checkpoints are compared."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import eval_mesh

Calls = list[tuple[Path, list[str], list[str]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Scoring without a mesh: the first checkpoint is right four times, the next one three."""
    made: Calls = []

    def score(model: Path, serve_flags: list[str], eval_flags: list[str]) -> int:
        right = 4 - len(made)
        made.append((model, serve_flags, eval_flags))
        if "--verdicts" in eval_flags:
            lines = [{"skill": "echo", "seed": n, "is_right": n < right} for n in range(4)]
            file = Path(eval_flags[eval_flags.index("--verdicts") + 1])
            file.write_text("\n".join(map(json.dumps, lines)))
        return 0

    monkeypatch.setattr(eval_mesh, "score", score)
    return made


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    made: list[list[str]] = []

    def call(command: list[str]) -> int:
        made.append(command)
        return 0

    monkeypatch.setattr(subprocess, "call", call)
    return made


def test_flags_go_to_the_mesh_and_to_the_evaluation(calls: Calls) -> None:
    assert eval_mesh.main(["--dtype", "float32", "--", "--prompts", "5"]) == 0
    nano = eval_mesh.ROOT / "models" / "glm-nano"
    assert calls == [(nano, ["--dtype", "float32"], ["--prompts", "5"])]


def test_a_model_can_be_named(calls: Calls) -> None:
    eval_mesh.main(["--model", "/some/where"])
    assert calls == [(Path("/some/where"), [], [])]


def test_a_scheme_quantizes_and_scores_both(
    calls: Calls, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_mesh.main(["--scheme", "w8a8", "--", "--prompts", "4"]) == 0
    ((*_, source, target, flag, scheme, overwrite, _, _),) = commands
    assert (flag, scheme, overwrite) == ("--scheme", "w8a8", "--overwrite")
    assert target == str(eval_mesh.CACHE / "glm-nano-w8a8")
    assert [str(model) for model, _, _ in calls] == [source, target]
    assert [flags for _, flags, _ in calls] == [[], []]
    (line,) = capsys.readouterr().out.splitlines()
    shown = json.loads(line)
    assert (shown["scheme"], shown["skill"]) == ("w8a8", "echo")
    assert (shown["before"], shown["after"], shown["lost"]) == (1.0, 0.75, 1)


def test_a_c8_scheme_is_served_with_8_bit_caches(calls: Calls, commands: list[list[str]]) -> None:
    eval_mesh.main(["--scheme", "w4a8c8", "--dtype", "bfloat16"])
    assert len(commands) == 1
    (_, plain, _), (_, flags, _) = calls
    assert plain == ["--dtype", "bfloat16"]
    assert flags[:2] == plain
    assert json.loads(flags[flags.index("--additional-config") + 1]) == {
        "enable_sparse_li_c8": True,
        "enable_sparse_sfa_c8": True,
    }


@pytest.mark.parametrize(("bound", "status"), [("24", 1), ("25", 0)])
def test_too_great_a_loss_is_a_failure(
    calls: Calls, commands: list[list[str]], bound: str, status: int
) -> None:
    assert eval_mesh.main(["--scheme", "w8a8", "--max-loss", bound]) == status


def test_a_quantizer_that_fails_ends_it(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "call", lambda command: 2)
    assert eval_mesh.main(["--scheme", "w9"]) == 2
    assert not calls


def test_verdicts_are_read_as_the_evaluation_writes_them(tmp_path: Path) -> None:
    from tools.nano.evaluate import Verdict, write_verdicts

    verdicts: list[Any] = [
        Verdict(skill="echo", seed=3, is_right=True),
        Verdict(skill="json", seed=3, is_right=False, error="gone"),
    ]
    write_verdicts(tmp_path / "v", verdicts)
    assert eval_mesh.read_verdicts(tmp_path / "v") == {"echo": {3: True}, "json": {3: False}}
