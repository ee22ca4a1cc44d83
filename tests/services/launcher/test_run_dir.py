import json
import os
import stat
from pathlib import Path

import pytest

from services.launcher.run_dir import (
    SERVICES,
    STATE_FILE,
    Failing,
    RunDirectory,
    make_run_directory,
)
from shared.config import check_address
from shared.errors import ConfigError


def test_the_directory_is_private_and_removed_with_the_mesh() -> None:
    run_dir = make_run_directory(None)
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    run_dir.log_path("worker").write_text("x")
    run_dir.clean(keep_logs=False)
    assert not run_dir.path.exists()


def test_logs_stay_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    run_dir = make_run_directory(None)
    assert run_dir.path.parent == tmp_path
    run_dir.log_path("worker").write_text("x")
    (run_dir.path / "worker.sock").write_text("")
    run_dir.clean(keep_logs=True)
    assert [file.name for file in run_dir.path.iterdir()] == ["worker.log"]


def test_a_directory_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    run_dir.clean(keep_logs=False)
    assert run_dir.path.is_dir()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755"):
        make_run_directory(tmp_path)


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        make_run_directory(tmp_path / ("x" * 90))


def test_a_path_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        make_run_directory(tmp_path / "file" / "r")


def test_every_address_is_valid(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    for name in SERVICES:
        for address in (
            run_dir.address(name),
            run_dir.health_address(name),
            run_dir.admin_address(name),
        ):
            assert check_address(address) == address


def test_the_state_file_lists_what_runs(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    run_dir.write_state("http://h:1", {"worker": 7})
    state = json.loads((run_dir.path / STATE_FILE).read_text())
    assert (state["url"], state["launcher_pid"]) == ("http://h:1", os.getpid())
    assert state["services"]["worker"]["pid"] == 7
    assert state["services"]["worker"]["address"] == run_dir.address("worker")


def test_a_rank_that_serves_nothing_has_a_log_and_no_address(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    run_dir.write_state("http://h:1", {"worker": 7, "worker.1": 8}, {"worker.1"})
    services = json.loads((run_dir.path / STATE_FILE).read_text())["services"]
    assert services["worker.1"] == {"pid": 8, "log": str(run_dir.log_path("worker.1"))}
    assert services["worker"]["health_address"] == run_dir.health_address("worker")


def test_a_process_that_keeps_ending_is_written_down(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    failing = {"worker": Failing(num_failures=5, next_start_at=9.5)}
    run_dir.write_state("http://h:1", {"worker": 7, "scheduler": 8}, failing=failing)
    services = json.loads((run_dir.path / STATE_FILE).read_text())["services"]
    assert services["worker"]["failing"] == {"num_failures": 5, "next_start_at": 9.5}
    assert "failing" not in services["scheduler"]


def test_places_to_meet_go_with_the_mesh(tmp_path: Path) -> None:
    run_dir = make_run_directory(tmp_path / "r")
    run_dir.rendezvous_path(0).write_text("")
    assert run_dir.rendezvous_path(0) != run_dir.rendezvous_path(1)
    run_dir.clean(keep_logs=True)
    assert not list(run_dir.path.iterdir())


def test_what_frontends_share_is_new_for_each_mesh_and_gone_with_it(tmp_path: Path) -> None:
    run_dir = RunDirectory(path=tmp_path, is_kept=True)
    run_dir.metrics_path().mkdir()
    (run_dir.metrics_path() / "counter_1.db").touch()
    run_dir.make_shared_paths()
    assert list(run_dir.metrics_path().iterdir()) == []
    assert list(run_dir.key_limits_path().iterdir()) == []
    run_dir.response_store_path().touch()
    run_dir.clean(keep_logs=True)
    assert not run_dir.metrics_path().exists()
    assert not run_dir.key_limits_path().exists()
    assert not run_dir.response_store_path().exists()
