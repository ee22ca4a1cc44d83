import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from services.launcher.commands import GRPC_SWITCHES, GRPC_VARIABLE, Command, build_commands
from services.launcher.ranks import Layout, num_cores
from services.launcher.run_dir import RunDirectory
from services.launcher.settings import UpSettings
from shared.parent import PARENT_VARIABLE


def commands(
    settings: UpSettings,
    path: Path,
    service_flags: Mapping[str, Sequence[str]] | None = None,
    layout: Layout | None = None,
) -> dict[str, Command]:
    run_dir = RunDirectory(path=path, is_kept=True)
    return {
        command.service: command
        for command in build_commands(settings, run_dir, 8123, service_flags or {}, layout)
    }


def value_of(command: Command, flag: str) -> str:
    return command.argv[command.argv.index(flag) + 1]


def test_each_service_is_told_its_addresses_and_its_neighbour(tmp_path: Path) -> None:
    found = commands(UpSettings(model=tmp_path, log_level="debug"), Path("/r"))
    for name, command in found.items():
        assert command.argv[:4] == (sys.executable, "-P", "-m", f"services.{name}")
        assert value_of(command, "--address") == f"unix:/r/{name}.sock"
        assert value_of(command, "--health-address") == f"unix:/r/{name}.health.sock"
        assert value_of(command, "--admin-address") == f"unix:/r/{name}.admin.sock"
        assert value_of(command, "--log-level") == "debug"
    assert value_of(found["scheduler"], "--worker-address") == "unix:/r/worker.sock"
    assert value_of(found["detokenizer"], "--scheduler-address") == "unix:/r/scheduler.sock"
    assert value_of(found["frontend"], "--detokenizer-address") == "unix:/r/detokenizer.sock"


def test_flags_reach_the_services_they_are_for(tmp_path: Path) -> None:
    settings = UpSettings(
        model=tmp_path,
        worker="replay",
        dtype="float32",
        max_model_len=99,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=1 << 20,
        num_threads=2,
        device="npu",
        gpu_memory_utilization=0.8,
        npu_generation="a2",
        served_model_name=["a", "b"],
    )
    found = commands(settings, Path("/r"))
    worker, frontend = found["worker"], found["frontend"]
    assert value_of(worker, "--dtype") == "float32"
    assert value_of(worker, "--kv-cache-memory-bytes") == str(1 << 20)
    assert value_of(worker, "--num-threads") == "2"
    assert value_of(worker, "--device") == "npu"
    assert value_of(worker, "--gpu-memory-utilization") == "0.8"
    assert value_of(worker, "--npu-generation") == "a2"
    for name in ("worker", "scheduler"):
        assert value_of(found[name], "--max-num-seqs") == "4"
        assert value_of(found[name], "--max-num-batched-tokens") == "64"
    assert value_of(frontend, "--max-model-len") == "99"
    assert value_of(frontend, "--port") == "8123"
    assert value_of(frontend, "--reasoning-parser") == "glm45"
    assert [word for word in frontend.argv if word in {"a", "b"}] == ["a", "b"]
    assert value_of(worker, "--worker-mode") == value_of(frontend, "--worker-mode") == "replay"


def test_what_was_not_said_is_left_to_the_services(tmp_path: Path) -> None:
    found = commands(UpSettings(model=tmp_path), Path("/r"))
    for command in found.values():
        assert "--max-num-seqs" not in command.argv
        assert "None" not in command.argv


def test_options_of_vllm_reach_the_service_that_honours_them(tmp_path: Path) -> None:
    found = commands(UpSettings(model=tmp_path), Path("/r"), {"worker": ("--weight-nz-mode=2",)})
    assert found["worker"].argv[-1] == "--weight-nz-mode=2"
    assert "--weight-nz-mode=2" not in found["scheduler"].argv


def test_api_keys_never_stand_on_a_command_line(tmp_path: Path) -> None:
    found = commands(UpSettings(model=tmp_path, api_key=["hunter2", "k2"]), Path("/r"))
    assert all("hunter2" not in " ".join(command.argv) for command in found.values())
    keys = found["frontend"].environment["GLM_MESH_FRONTEND_API_KEY"]
    assert json.loads(keys) == ["hunter2", "k2"]
    assert "GLM_MESH_FRONTEND_API_KEY" not in found["worker"].environment


def test_services_know_their_launcher_and_read_only_files_with_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLM_MESH_CONFIG", "somewhere")
    monkeypatch.setenv("GLM_MESH_API_KEY", "hunter2")
    flat, tables = tmp_path / "flat.toml", tmp_path / "tables.toml"
    flat.write_text("port = 1\n")
    tables.write_text("[up]\nport = 1\n[scheduler]\nmax_num_seqs = 1\n")
    found = commands(UpSettings(model=tmp_path, config=flat), Path("/r"))
    assert found["worker"].environment[PARENT_VARIABLE] == str(os.getpid())
    assert "GLM_MESH_CONFIG" not in found["worker"].environment
    assert "hunter2" not in found["worker"].environment.values()
    assert "--config" not in found["scheduler"].argv
    found = commands(UpSettings(model=tmp_path, config=tables), Path("/r"))
    assert value_of(found["scheduler"], "--config") == str(tables)


def test_each_rank_is_a_process_and_the_first_alone_serves(tmp_path: Path) -> None:
    layout = Layout(tensor_parallel_size=2)
    found = commands(
        UpSettings(model=tmp_path), Path("/r"), {"worker": ("--weight-nz-mode=2",)}, layout
    )
    assert list(found) == ["worker", "worker.1", "scheduler", "detokenizer", "frontend"]
    leader, led = found["worker"], found["worker.1"]
    assert value_of(leader, "--health-address") == "unix:/r/worker.health.sock"
    assert "--health-address" not in led.argv
    assert "--admin-address" not in led.argv
    assert (leader.is_serving, led.is_serving) == (True, False)
    for number, command in enumerate((leader, led)):
        assert value_of(command, "--rank") == str(number)
        assert value_of(command, "--rendezvous") == "file:///r/world-0.meet"
        assert value_of(command, "--num-threads") == str(max(1, num_cores() // 2))
        assert command.argv[-1] == "--weight-nz-mode=2"
    assert leader.unit == led.unit
    assert led.title == "worker.1, rank 1"
    words = found["scheduler"].argv
    assert [words[at + 1] for at, word in enumerate(words) if word == "--worker-address"] == [
        "unix:/r/worker.sock"
    ]


def test_threads_that_were_asked_for_are_those_of_each_rank(tmp_path: Path) -> None:
    layout = Layout(tensor_parallel_size=2)
    found = commands(UpSettings(model=tmp_path, num_threads=3), Path("/r"), layout=layout)
    assert value_of(found["worker.1"], "--num-threads") == "3"


def test_the_scheduler_is_told_the_leader_of_each_replica(tmp_path: Path) -> None:
    layout = Layout(tensor_parallel_size=2, data_parallel_size=2)
    found = commands(UpSettings(model=tmp_path), Path("/r"), layout=layout)
    words = found["scheduler"].argv
    assert [words[at + 1] for at, word in enumerate(words) if word == "--worker-address"] == [
        "unix:/r/worker.sock",
        "unix:/r/worker.2.sock",
    ]
    assert found["worker.2"].unit != found["worker"].unit
    assert value_of(found["worker.3"], "--rendezvous") == "file:///r/world-1.meet"


@pytest.mark.parametrize(
    ("layout", "num_ranks"),
    [
        (Layout(), "1"),
        (Layout(data_parallel_size=2), "1"),
        (Layout(data_parallel_size=2, tensor_parallel_size=2), "2"),
        (Layout(data_parallel_size=2, enable_expert_parallel=True), "2"),
    ],
)
def test_the_scheduler_is_told_how_many_ranks_start_again_together(
    tmp_path: Path, layout: Layout, num_ranks: str
) -> None:
    found = commands(UpSettings(model=tmp_path), Path("/r"), layout=layout)
    assert value_of(found["scheduler"], "--num-ranks") == num_ranks


def test_worlds_on_one_machine_get_devices_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6,7")
    layout = Layout(data_parallel_size=2)
    for device, expected in (("npu", ["6", "7"]), ("cpu", ["6,7", "6,7"])):
        settings = UpSettings.model_validate({"model": tmp_path, "device": device})
        found = commands(settings, Path("/r"), layout=layout)
        seen = [
            found[name].environment["ASCEND_RT_VISIBLE_DEVICES"] for name in ("worker", "worker.1")
        ]
        assert seen == expected


def test_grpc_is_told_before_it_is_imported_how_to_watch_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(GRPC_VARIABLE, raising=False)
    for command in commands(UpSettings(model=tmp_path), Path("/r")).values():
        assert command.environment[GRPC_VARIABLE] == GRPC_SWITCHES


def test_who_sets_grpc_experiments_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GRPC_VARIABLE, "tcp_rcv_lowat")
    found = commands(UpSettings(model=tmp_path), Path("/r"))
    assert found["scheduler"].environment[GRPC_VARIABLE] == "tcp_rcv_lowat"


def test_this_grpc_knows_every_switch() -> None:
    """It prints a line for each name that it does not know, and goes on as if it were not there."""
    environment = {**os.environ, GRPC_VARIABLE: GRPC_SWITCHES}
    command = [sys.executable, "-c", "import grpc.aio"]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert done.stderr == b""
    environment[GRPC_VARIABLE] = "-event_engine_nonsense"
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert b"event_engine_nonsense" in done.stderr


def test_every_frontend_knows_every_detokenizer(tmp_path: Path) -> None:
    run_dir = RunDirectory(path=Path("/r"), is_kept=True)
    settings = UpSettings(model=tmp_path, detokenizer_count=3)
    own = {"detokenizer": ["--peer-stall-timeout-s", "9"]}
    made = build_commands(settings, run_dir, 8123, own, num_frontends=2)
    names = ["detokenizer", "detokenizer-1", "detokenizer-2"]
    assert [command.service for command in made] == [
        *("worker", "scheduler", *names, "frontend", "frontend-1")
    ]
    for command in made[2:5]:
        assert command.unit == command.service
        assert command.argv[3] == "services.detokenizer"
        assert value_of(command, "--address") == f"unix:/r/{command.service}.sock"
        assert value_of(command, "--health-address") == f"unix:/r/{command.service}.health.sock"
        assert value_of(command, "--scheduler-address") == "unix:/r/scheduler.sock"
        assert value_of(command, "--peer-stall-timeout-s") == "9"
    for command in made[5:]:
        words = command.argv
        told = [words[i + 1] for i, word in enumerate(words) if word == "--detokenizer-address"]
        assert told == [f"unix:/r/{name}.sock" for name in names]


def test_several_frontends_share_port_numbers_and_kept_responses(tmp_path: Path) -> None:
    run_dir = RunDirectory(path=Path("/r"), is_kept=True)
    made = build_commands(UpSettings(model=tmp_path), run_dir, 8123, {}, num_frontends=3)
    frontends = [command for command in made if command.service.startswith("frontend")]
    assert [command.service for command in frontends] == ["frontend", "frontend-1", "frontend-2"]
    for command in frontends:
        assert command.argv[3] == "services.frontend"
        assert value_of(command, "--port") == "8123"
        assert value_of(command, "--address") == f"unix:/r/{command.service}.sock"
        assert value_of(command, "--response-store-path") == "/r/responses.db"
        assert value_of(command, "--key-limits-path") == "/r/keys"
        assert "--reuse-port" in command.argv
        assert command.environment["PROMETHEUS_MULTIPROC_DIR"] == "/r/metrics"
    (alone,) = (c for c in commands(UpSettings(model=tmp_path), Path("/r")).values()
                if c.service.startswith("frontend"))  # fmt: skip
    assert "--reuse-port" not in alone.argv
    assert "PROMETHEUS_MULTIPROC_DIR" not in alone.environment


def test_every_detokenizer_knows_every_scheduler_and_each_has_its_own_workers(
    tmp_path: Path,
) -> None:
    layout = Layout(data_parallel_size=2, tensor_parallel_size=2, num_schedulers=2)
    settings = UpSettings(model=tmp_path, scheduler_count=2, detokenizer_count=2)
    found = commands(settings, Path("/r"), layout=layout)
    assert list(found)[-5:] == [
        *("scheduler", "scheduler-1", "detokenizer", "detokenizer-1", "frontend")
    ]

    def values_of(name: str, flag: str) -> list[str]:
        words = found[name].argv
        return [words[at + 1] for at, word in enumerate(words) if word == flag]

    for name in ("detokenizer", "detokenizer-1"):
        told = values_of(name, "--scheduler-address")
        assert told == ["unix:/r/scheduler.sock", "unix:/r/scheduler-1.sock"]
    leaders = [
        ["unix:/r/worker.sock", "unix:/r/worker.2.sock"],
        ["unix:/r/worker.4.sock", "unix:/r/worker.6.sock"],
    ]
    for name, own in zip(("scheduler", "scheduler-1"), leaders, strict=True):
        assert values_of(name, "--worker-address") == own
        assert found[name].unit == name
        assert found[name].argv[3] == "services.scheduler"
        assert values_of(name, "--admin-address") == [f"unix:/r/{name}.admin.sock"]
    assert values_of("worker.7", "--rendezvous") == ["file:///r/world-3.meet"]
    assert {len(values_of(f"worker.{n}", "--num-threads")) for n in range(1, 8)} == {1}
