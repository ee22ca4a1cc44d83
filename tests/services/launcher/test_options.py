import pytest

from services.launcher.options import ALWAYS_SO, UNBUILT, strip_known_options
from shared.errors import ConfigError


@pytest.mark.parametrize(
    "argv",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor_parallel_size=2"],
        ["-tp", "2"],
        ["--quantization", "ascend"],
        ["--speculative-config", '{"method": "mtp"}'],
        ["--enable-prefix-caching"],
        ["--enable-expert-parallel"],
        ["--no-enable-chunked-prefill"],
        ["--kv-transfer-config", "{}"],
        ["--block-size", "64"],
        ["--seed", "1024"],
        ["--distributed-executor-backend", "ray"],
    ],
)
def test_what_is_not_built_refuses_by_name(argv: list[str]) -> None:
    name = {"-tp": "--tensor-parallel-size"}.get(argv[0], argv[0].split("=")[0])
    with pytest.raises(ConfigError, match=name.replace("_", "-") + ".*not available"):
        strip_known_options(["--port", "1", *argv])


@pytest.mark.parametrize(
    "argv",
    [
        ["--tensor-parallel-size", "1"],
        ["--tensor-parallel-size=1"],
        ["-pp", "1"],
        ["--block-size", "128"],
        ["--kv-cache-dtype", "auto"],
        ["--no-enable-prefix-caching"],
        ["--enable-auto-tool-choice"],
        ["--enforce_eager"],
        ["--trust-remote-code"],
        ["--distributed-executor-backend", "mp"],
    ],
)
def test_asking_for_what_is_so_anyway_is_fine(argv: list[str]) -> None:
    assert strip_known_options(["--port", "1", *argv, "--host", "h"]) == [
        "--port",
        "1",
        "--host",
        "h",
    ]


def test_other_flags_are_left_as_they_are() -> None:
    argv = ["--max_num_seqs=4", "--no-such", "--model", "x"]
    assert strip_known_options(argv) == argv


def test_a_first_word_is_the_checkpoint() -> None:
    assert strip_known_options(["dir", "--port", "1"]) == ["--model", "dir", "--port", "1"]


def test_every_refusal_says_what_is_missing() -> None:
    assert all(option.missing for option in UNBUILT.values())
    assert not ALWAYS_SO & set(UNBUILT)
