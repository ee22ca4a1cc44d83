import json
from pathlib import Path

import pytest

from services.launcher.__main__ import main
from services.launcher.status import command
from services.launcher.status.mesh import ProcessRow, Target
from tests.services.launcher.status.rows import process, replica


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[ProcessRow]:
    """What processes answer; a mesh of one process runs at `tmp_path`."""
    found: list[ProcessRow] = [process(replicas=[replica()])]
    page = {"url": "http://h:1", "launcher_pid": 1, "services": {"scheduler": {"pid": 7}}}
    (tmp_path / "mesh.json").write_text(json.dumps(page))

    async def ask_all(targets: list[Target], timeout_s: float) -> list[ProcessRow]:
        assert [target.name for target in targets] == ["scheduler"]
        assert timeout_s == 0.5
        return found

    monkeypatch.setattr(command, "ask_all", ask_all)
    return found


@pytest.mark.parametrize("words", [["--json"], ["--output", "json"]])
def test_programs_get_json_and_the_exit_code_says_whether_all_is_ready(
    words: list[str], rows: list[ProcessRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["status", "--run-dir", str(tmp_path), "--timeout-s", "0.5", *words]
    assert main(flags) == 0
    assert json.loads(capsys.readouterr().out)["is_ready"] is True
    rows[0] = process(replicas=[replica(0, "drained")])
    assert main(flags) == 1
    assert json.loads(capsys.readouterr().out)["is_ready"] is False


def test_people_get_a_table(
    rows: list[ProcessRow], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--run-dir", str(tmp_path), "--timeout-s", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("NAME")
    assert out.endswith("ready at http://h:1\n")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--run-dir", "/nowhere/at/all"], "mesh.json is missing"),
        (["--output", "xml"], "--output"),
        (["--timeout-s", "0"], "--timeout-s"),
        (["--admin-address", "nowhere"], "--admin-address"),
        (["--jsn"], "unknown option --jsn"),
    ],
)
def test_a_mistake_is_one_line_and_exits_with_two(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *flags]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
