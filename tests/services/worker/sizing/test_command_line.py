import pytest

from services.worker.sizing.command_line import read_command_line
from shared.errors import ConfigError


def test_flags_without_bearing_on_memory_are_left_out_and_named() -> None:
    line = read_command_line(
        ["--host", "0.0.0.0", "--port=8000", "--headless", "--max-num-seqs", "8", "--seed", "1"]
    )
    assert line.flags == ("--max-num-seqs", "8")
    assert line.left_out == ("--host", "--port", "--headless", "--seed")


def test_a_value_is_never_taken_for_a_flag() -> None:
    line = read_command_line(["--kv-transfer-config", '{"a": "--host"}', "--model", "m"])
    assert line.flags == ("--model", "m")
    assert line.left_out == ("--kv-transfer-config",)


def test_the_forms_of_vllm_are_understood() -> None:
    line = read_command_line(["models/x", "-tp", "8", "-dp=2", "--max_model_len", "4096", "--json"])
    assert line.flags == (
        *("--model", "models/x"),
        *("--tensor-parallel-size", "8"),
        "--data-parallel-size=2",
        *("--max-model-len", "4096"),
        "--output=json",
    )


def test_negated_switches_have_no_bearing_either() -> None:
    assert read_command_line(["--no-enable-prefix-caching"]).flags == ()


def test_prompts_are_not_divided_over_ranks() -> None:
    assert read_command_line(["--prefill-context-parallel-size", "1"]).flags == ()
    with pytest.raises(ConfigError, match="--prefill-context-parallel-size 2: must be 1"):
        read_command_line(["--prefill-context-parallel-size", "2"])


def test_a_missing_value_is_told() -> None:
    with pytest.raises(ConfigError, match="--port needs a value"):
        read_command_line(["--port"])


def test_unknown_flags_are_left_for_the_settings_to_refuse() -> None:
    assert read_command_line(["--no-such-flag"]).flags == ("--no-such-flag",)
