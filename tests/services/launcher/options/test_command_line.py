from typing import Any

import pytest

from services.launcher.options.command_line import CommandLine, read_command_line


def read(*words: str) -> CommandLine:
    return read_command_line(words)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--tensor-parallel-size", "2"], {"tensor_parallel_size": "2"}),
        (["--tensor_parallel_size=2"], {"tensor_parallel_size": "2"}),
        (["-tp", "2"], {"tensor_parallel_size": "2"}),
        (["-dp=2"], {"data_parallel_size": "2"}),
        (["-ep"], {"enable_expert_parallel": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--no_async_scheduling"], {"async_scheduling": False}),
        (["--seed", "-1"], {"seed": "-1"}),
        (["--lora-modules", "a=b", "c=d"], {"lora_modules": ["a=b", "c=d"]}),
        (["-sc", '{"a":\n 1}'], {"speculative_config": {"a": 1}}),
        (["--additional-config={}"], {"additional_config": {}}),
        (
            ["--compilation-config.cudagraph-mode", "NONE", "-cc.cudagraph_capture_sizes=[4]"],
            {"compilation_config": {"cudagraph_mode": "NONE", "cudagraph_capture_sizes": [4]}},
        ),
        (
            ["--additional-config", '{"a": 1}', "--additional-config.b.c", "true"],
            {"additional_config": {"a": 1, "b": {"c": True}}},
        ),
    ],
)
def test_every_way_to_write_an_option_is_read(words: list[str], values: dict[str, Any]) -> None:
    line = read(*words)
    assert line.values == values
    assert not line.rest
    assert not line.problems


def test_words_of_the_settings_are_left_as_they_are() -> None:
    line = read("--port", "1", "--max_model_len=4k", "-tp", "1", "--host", "h")
    assert line.rest == ("--port", "1", "--max-model-len=4k", "--host", "h")


@pytest.mark.parametrize(
    "words",
    [["dir", "--port", "1"], ["--port", "1", "dir"], ["--headless", "dir", "--port=1"]],
)
def test_a_word_without_an_option_is_the_checkpoint(words: list[str]) -> None:
    rest = read(*words).rest
    assert rest[rest.index("--model") + 1] == "dir"


def test_the_checkpoint_is_given_once() -> None:
    assert read("dir", "dir2").problems == (
        "dir2: belongs to no option, and the checkpoint is given",
    )
    assert read("--model", "a", "b").problems


def test_names_of_the_model_may_stand_in_a_row() -> None:
    line = read("--served-model-name", "a", "b", "--port", "1")
    assert line.rest == (
        *("--served-model-name", "a", "--served-model-name", "b"),
        *("--port", "1"),
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--tensor-parallel-size"], "--tensor-parallel-size needs a value"),
        (["--tensor-parallel-size", "--headless"], "--tensor-parallel-size needs a value"),
        (["--headless=yes"], "--headless=yes: takes no value; --headless or --no-headless it is"),
        (["--no-headless=1"], "--no-headless=1: takes no value"),
        (["--bogus", "1"], "unknown option --bogus"),
        (["--enable-prefix-cache"], "did you mean --enable-prefix-caching"),
        (["--no-seed"], "unknown option --no-seed"),
        (["--seed.x", "1"], "unknown option --seed.x"),
        (["--additional-config", "{"], "--additional-config: no JSON"),
        (["-sc", '{"a": 1}', "-sc", '{"a": 2}'], "--speculative-config is given twice"),
        (["-sc", '{"a": 1}', "-sc.a", "2"], "a is given twice"),
        (["-sc", '{"a": 1}', "-sc.a.b", "2"], "a has a value already"),
    ],
)
def test_a_mistake_is_kept_beside_the_rest(words: list[str], problem: str) -> None:
    line = read("-tp", "4", *words, "--port", "1")
    assert len(line.problems) == 1
    assert problem in line.problems[0]
    assert line.values["tensor_parallel_size"] == "4"
    assert line.rest == ("--port", "1")


def test_an_option_given_twice_counts_the_last_time_and_is_told() -> None:
    line = read("-tp", "2", "--tensor-parallel-size", "4")
    assert line.values == {"tensor_parallel_size": "4"}
    assert line.lines == ("--tensor-parallel-size is given twice: --tensor-parallel-size 4 counts",)
    assert not read("-tp", "2", "-tp", "2").lines
    assert read("--headless", "--no-headless").lines == (
        "--headless is given twice: --no-headless counts",
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--scheduler-count", "2", "--scheduler_count=3"], "--scheduler-count 3"),
        (["--port", "1", "--port", "2", "--port", "2"], "--port 2"),
        (["/a", "--model", "/b"], "--model /b"),
    ],
)
def test_a_setting_of_up_given_twice_counts_the_last_time_and_is_told(
    words: list[str], line: str
) -> None:
    flag = line.partition(" ")[0]
    assert read(*words).lines == (f"{flag} is given twice: {line} counts",)


def test_a_setting_given_twice_alike_or_one_that_may_be_repeated_is_as_it_was_meant() -> None:
    keys = ["--api-key", "a", "--api-key", "b"]
    assert read("--port", "1", "--port=1", "--served-model-name", "a", "b", *keys).lines == ()
