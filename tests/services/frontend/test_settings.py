"""Settings of the frontend."""

import json
from pathlib import Path

import pytest

from services.frontend.settings import FrontendSettings, checkpoint_context_length
from shared.config import parse, shown
from shared.errors import CheckpointError, ConfigError

LEAST = ["--address", "unix:/tmp/f", "--detokenizer-address", "unix:/tmp/d", "--model", "/m/nano"]


def test_the_flags_of_the_launcher_are_understood() -> None:
    flags = [
        *LEAST, "--host", "::1", "--port", "9000", "--served-model-name", "a",
        "--served-model-name", "b", "--api-key", "k1", "--api-key", "k2", "--max-model-len", "99",
        "--reasoning-parser", "glm45", "--tool-call-parser", "glm47", "--worker-mode", "replay",
    ]  # fmt: skip
    settings = parse(FrontendSettings, flags)
    assert (settings.host, settings.port, settings.max_model_len) == ("::1", 9000, 99)
    assert settings.model_names == ("a", "b")
    assert [key.get_secret_value() for key in settings.api_key] == ["k1", "k2"]
    assert settings.worker_mode == "replay"


def test_several_detokenizers_are_named_with_commas_or_one_by_one() -> None:
    flags = [*LEAST, "--detokenizer-address", "unix:/tmp/e,host:7000"]
    settings = parse(FrontendSettings, flags)
    assert settings.detokenizer_address == ["unix:/tmp/d", "unix:/tmp/e", "host:7000"]


def test_bounds_of_second_tries_are_settings() -> None:
    flags = [*LEAST, "--resubmit-timeout-s", "2.5", "--max-resubmit-bytes", "1000"]
    bounds = parse(FrontendSettings, flags).resubmit_bounds
    assert (bounds.timeout_s, bounds.max_bytes) == (2.5, 1000)


def test_the_folder_names_the_model_when_nothing_else_does() -> None:
    assert parse(FrontendSettings, LEAST).model_names == ("nano",)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reasoning-parser", "qwen3"], "glm45"),
        (["--tool-call-parser", "hermes"], "glm47"),
        (["--port", "70000"], "--port"),
        (["--api-key", ""], "API key is empty"),
        (["--served-model-name", ""], "empty"),
        (["--worker-mode", "fast"], "replay"),
        (["--detokenizer-address", "unix:/tmp/d"], "--detokenizer-address .*twice"),
        (["--resubmit-timeout-s", "-1"], "--resubmit-timeout-s"),
        (["--silence-timeout-s", "1"], "--silence-timeout-s"),
    ],
)
def test_a_wrong_value_names_its_flag_and_what_is_valid(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse(FrontendSettings, [*LEAST, *flags])
    assert flags[0] in str(caught.value)


def test_keys_are_never_shown() -> None:
    settings = parse(FrontendSettings, [*LEAST, "--api-key", "sk-secret"])
    assert "sk-secret" not in str(shown(settings)) + repr(settings)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"max_position_embeddings": 0}'])
def test_a_config_without_a_length_is_a_checkpoint_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        checkpoint_context_length(tmp_path)


def test_the_context_length_is_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    assert checkpoint_context_length(tmp_path) == 77
    with pytest.raises(CheckpointError):
        checkpoint_context_length(tmp_path / "none")


@pytest.mark.parametrize(
    ("flags", "origins"),
    [
        (['--allowed-origins=["https://a", "https://b"]'], ["https://a", "https://b"]),
        (["--allowed-origins=*"], ["*"]),
        (["--allowed-origins", "https://a", "--allowed-origins", "https://b"],
         ["https://a", "https://b"]),
        ([], []),
    ],
)  # fmt: skip
def test_lists_of_vllm_are_json_or_words(flags: list[str], origins: list[str]) -> None:
    settings = parse(FrontendSettings, [*LEAST, *flags], prog="frontend")
    assert settings.allowed_origins == origins


def test_a_list_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="no JSON list"):
        parse(FrontendSettings, [*LEAST, "--allowed-origins=[a"], prog="frontend")
