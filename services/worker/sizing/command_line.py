"""A command line of `vllm serve` or `glm-mesh up`, cut down to what bears on memory.

So that the command of a deployment can be planned as it is; what was left out is told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.errors import ConfigError

_VALUED: Final = frozenset(
    {
        "--api-key",
        "--api-server-count",
        "--block-size",
        "--cp-kv-cache-interleave-size",
        "--data-parallel-address",
        "--data-parallel-backend",
        "--data-parallel-rank",
        "--data-parallel-rpc-port",
        "--data-parallel-size-local",
        "--data-parallel-start-rank",
        "--distributed-executor-backend",
        "--host",
        "--kv-transfer-config",
        "--load-format",
        "--master-addr",
        "--master-port",
        "--nnodes",
        "--node-rank",
        "--port",
        "--profiler-config",
        "--quantization",
        "--reasoning-parser",
        "--safetensors-load-strategy",
        "--seed",
        "--served-model-name",
        "--tool-call-parser",
    }
)
_SWITCHES: Final = frozenset(
    {
        "--async-scheduling",
        "--enable-auto-tool-choice",
        "--enable-chunked-prefill",
        "--enable-prefix-caching",
        "--headless",
        "--trust-remote-code",
    }
)
_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-q": "--quantization",
}
_PREFILL_CONTEXT: Final = "--prefill-context-parallel-size"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line taken apart."""

    flags: tuple[str, ...]
    """For the settings of a plan."""
    left_out: tuple[str, ...]
    """Names of flags that have no bearing on memory."""


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart; a first word that is no flag is the checkpoint.

    Raises:
        ConfigError: A flag lacks its value, or asks for a layout that does not exist here.
    """
    flags: list[str] = []
    left_out: dict[str, None] = {}
    words = iter(["--model", *argv] if argv and not argv[0].startswith("-") else argv)
    for word in words:
        flag, equals, value = _spelled(word).partition("=")
        if flag == "--json":
            flags.append("--output=json")
        elif flag in _SWITCHES or flag.replace("--no-", "--") in _SWITCHES:
            left_out[flag] = None
        elif flag in _VALUED or flag == _PREFILL_CONTEXT:
            value = value if equals else _value_of(flag, next(words, None))
            _check_prefill_context(flag, value)
            left_out[flag] = None
        else:
            flags.append(flag + equals + value)
    return CommandLine(flags=tuple(flags), left_out=tuple(left_out))


def _spelled(word: str) -> str:
    """A flag with dashes and its long name; other words as they are."""
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        flag = flag.replace("_", "-")
    return _SHORT.get(flag, flag) + equals + value


def _value_of(flag: str, word: str | None) -> str:
    if word is None:
        raise ConfigError(f"{flag} needs a value")
    return word


def _check_prefill_context(flag: str, value: str) -> None:
    if flag == _PREFILL_CONTEXT and value != "1":
        raise ConfigError(f"{flag} {value}: must be 1: prompts are not divided over more ranks")
