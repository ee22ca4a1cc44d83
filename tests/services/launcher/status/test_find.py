import json
from pathlib import Path

import pytest

from services.launcher.run_dir import Failing, RunDirectory, make_run_directory
from services.launcher.status.find import find
from shared.errors import ConfigError

# Above the largest that Linux gives.
NO_PID = 2**22 + 1


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories go that nobody named."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def start(silent: frozenset[str] = frozenset()) -> RunDirectory:
    made = make_run_directory(None)
    made.write_state("http://h:1", {"worker": 11, "worker.1": 12, "scheduler": 13}, silent)
    return made


def test_the_only_mesh_that_runs_here_is_the_one_that_is_meant(root: Path) -> None:
    made = start(silent=frozenset({"worker.1"}))
    assert made.path.parent == root
    found = find(None, [])
    assert found.url == "http://h:1"
    assert [(t.name, t.pid) for t in found.targets] == [
        ("worker", 11),
        ("worker.1", 12),
        ("scheduler", 13),
    ]
    assert found.targets[1].admin_address is None
    assert found.targets[2].admin_address == made.admin_address("scheduler")
    assert found.targets[2].health_address == made.health_address("scheduler")


def test_what_keeps_ending_is_read(root: Path) -> None:
    failing = Failing(num_failures=4, next_start_at=2.5)
    make_run_directory(None).write_state(
        "u", {"worker": 1, "scheduler": 2}, failing={"scheduler": failing}
    )
    assert [target.failing for target in find(None, []).targets] == [None, failing]


def test_a_mesh_whose_launcher_is_gone_is_none(root: Path) -> None:
    made = start()
    assert find(None, []).url
    page = made.path / "mesh.json"
    state = json.loads(page.read_text())
    page.write_text(json.dumps(state | {"launcher_pid": NO_PID}))
    with pytest.raises(ConfigError, match="no mesh runs here"):
        find(None, [])


def test_of_several_meshes_the_directory_says_which(root: Path) -> None:
    first, second = start(), start()
    with pytest.raises(ConfigError, match="2 meshes run here, --run-dir says which") as raised:
        find(None, [])
    assert str(first.path) in str(raised.value)
    assert len(find(second.path, []).targets) == 3


def test_addresses_of_processes_that_were_started_by_hand(root: Path) -> None:
    found = find(None, ["h:1", "unix:/x"])
    assert [(t.name, t.admin_address, t.pid) for t in found.targets] == [
        ("h:1", "h:1", 0),
        ("unix:/x", "unix:/x", 0),
    ]
    with pytest.raises(ConfigError, match="exclude each other"):
        find(root, ["h:1"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"services": {"worker": {}}, "url": "u"}'])
def test_a_directory_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"no mesh runs there \(mesh\.json is missing\)"):
        find(tmp_path, [])
    (tmp_path / "mesh.json").write_text(text)
    with pytest.raises(ConfigError, match=r"mesh\.json: not what"):
        find(tmp_path, [])
