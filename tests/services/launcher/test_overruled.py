from pathlib import Path

import pytest

from services.launcher.commands import build_commands
from services.launcher.overruled import overruled
from services.launcher.ranks import Layout
from services.launcher.run_dir import RunDirectory
from services.launcher.settings import UpSettings


def told(
    tmp_path: Path, variables: dict[str, str], config: Path | None = None, **settings: object
) -> list[str]:
    asked = UpSettings(model=tmp_path, config=config, **settings)  # type: ignore[arg-type]  # a test's
    commands = build_commands(
        asked,
        RunDirectory(path=Path("/r"), is_kept=True),
        8123,
        {"scheduler": ("--watermark=0.1", "--no-async-scheduling")},
        Layout(tensor_parallel_size=2),
    )
    return list(overruled(commands, variables, config))


@pytest.mark.parametrize(
    ("variable", "kind", "flag"),
    [
        ("GLM_MESH_DETOKENIZER_SCHEDULER_ADDRESS", "detokenizer", "--scheduler-address"),
        ("glm_mesh_scheduler_worker_address", "scheduler", "--worker-address"),
        ("GLM_MESH_FRONTEND_PORT", "frontend", "--port"),
        ("GLM_MESH_WORKER_MODEL", "worker", "--model"),
        ("GLM_MESH_SCHEDULER_WATERMARK", "scheduler", "--watermark"),
        ("GLM_MESH_SCHEDULER_ASYNC_SCHEDULING", "scheduler", "--async-scheduling"),
        ("GLM_MESH_WORKER_MODE", "worker", "--worker-mode"),
    ],
)
def test_a_variable_that_a_flag_of_up_overrules_is_named(
    tmp_path: Path, variable: str, kind: str, flag: str
) -> None:
    line = f"{variable}: no effect on the {kind}: up itself gives {flag}"
    assert line in told(tmp_path, {variable: "x"})


@pytest.mark.parametrize(
    "variable",
    [
        "GLM_MESH_SCHEDULER_WORKER_GRACE_S",  # up leaves it to the service
        "GLM_MESH_SCHEDULER_MAX_NUM_SEQS",  # given by up only if up was asked
        "GLM_MESH_PORT",  # up's own
        "GLM_MESH_UP_PORT",
        "GLM_MESH_FRONTEND_API_KEY_FILE",
        "SCHEDULER_ADDRESS",
    ],
)
def test_a_variable_that_has_its_effect_is_not(tmp_path: Path, variable: str) -> None:
    assert told(tmp_path, {variable: "7"}) == []


def test_a_setting_that_up_was_asked_for_beats_that_of_a_service(tmp_path: Path) -> None:
    variables = {"GLM_MESH_SCHEDULER_MAX_NUM_SEQS": "7"}
    assert told(tmp_path, variables, max_num_seqs=3) == [
        "GLM_MESH_SCHEDULER_MAX_NUM_SEQS: no effect on the scheduler: "
        "up itself gives --max-num-seqs"
    ]


def test_keys_of_up_replace_those_of_the_frontend_without_a_word_of_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"GLM_MESH_FRONTEND_API_KEY": "theirs"}
    monkeypatch.setenv("GLM_MESH_FRONTEND_API_KEY", "theirs")
    assert told(tmp_path, variables) == []
    assert told(tmp_path, variables, api_key=["ours"]) == [
        "GLM_MESH_FRONTEND_API_KEY: no effect on the frontend: up itself gives it"
    ]


def test_a_setting_in_the_table_of_a_service_is_told_alike(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        '[up]\nport = 1\n[detokenizer]\nscheduler-address = "h:1"\n'
        "[scheduler]\nworker_grace_s = 3\n"
    )
    assert told(tmp_path, {}, config=file) == [
        f"scheduler-address of [detokenizer] in {file}: no effect: "
        "up itself gives --scheduler-address"
    ]
