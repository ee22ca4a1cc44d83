import os
from pathlib import Path

import pytest

from services.launcher.settings import UpSettings
from shared.config import parse
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GLM_MESH_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("1.5k", 1500),
        ("512M", 512 << 20),
        ("1g", 10**9),
    ],
)
def test_counts_take_units(tmp_path: Path, text: str, number: int) -> None:
    argv = ["--model", str(tmp_path), "--kv-cache-memory-bytes", text]
    assert parse(UpSettings, argv).kv_cache_memory_bytes == number


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "8x", ""])
def test_bad_counts_are_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse(UpSettings, ["--model", str(tmp_path), f"--max-model-len={text}"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--reasoning-parser", "deepseek_r1"],
            "--reasoning-parser 'deepseek_r1'.*'glm45' or 'none'",
        ),
        (["--tool-call-parser", "hermes"], "--tool-call-parser 'hermes'.*'glm47'"),
        (["--worker", "remote"], "--worker 'remote'.*'model' or 'replay'"),
        (["--dtype", "half"], "--dtype 'half'.*'bfloat16' or 'float32'"),
        (["--port", "70000"], "--port '70000'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_valid_ones(
    tmp_path: Path, argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(UpSettings, ["--model", str(tmp_path), *argv])


def test_a_missing_checkpoint_is_named() -> None:
    with pytest.raises(ConfigError, match="--model /no/such: no such directory"):
        parse(UpSettings, ["--model", "/no/such"])


def test_without_a_model_the_projects_own_is_served() -> None:
    assert parse(UpSettings, []).checkpoint.parts[-2:] == ("models", "glm-nano")
