"""Options that users of vLLM try: which of them are not built, and which say what is so anyway.

An option whose feature is missing refuses by name instead of being ignored; its default value is
fine, because it asks for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbuilt:
    """An option without its feature: the values that ask for nothing, and what is missing.

    `is_switch` options take no value; naming them asks for the feature.
    """

    missing: str
    defaults: tuple[str, ...] = ()
    is_switch: bool = False


_ONE: Final = ("1",)
_PARALLEL: Final = "one worker with one rank is built"

UNBUILT: Final[Mapping[str, Unbuilt]] = {
    "--tensor-parallel-size": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--pipeline-parallel-size": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--data-parallel-size": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--data-parallel-size-local": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--data-parallel-start-rank": Unbuilt(missing=_PARALLEL, defaults=("0",)),
    "--data-parallel-rank": Unbuilt(missing=_PARALLEL),
    "--data-parallel-address": Unbuilt(missing=_PARALLEL),
    "--data-parallel-rpc-port": Unbuilt(missing=_PARALLEL),
    "--decode-context-parallel-size": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--prefill-context-parallel-size": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--enable-expert-parallel": Unbuilt(missing=_PARALLEL, is_switch=True),
    "--enable-eplb": Unbuilt(missing=_PARALLEL, is_switch=True),
    "--headless": Unbuilt(missing=_PARALLEL, is_switch=True),
    "--master-addr": Unbuilt(missing=_PARALLEL, defaults=("127.0.0.1",)),
    "--master-port": Unbuilt(missing=_PARALLEL),
    "--cp-kv-cache-interleave-size": Unbuilt(missing=_PARALLEL, defaults=("1", "128")),
    "--distributed-executor-backend": Unbuilt(missing=_PARALLEL, defaults=("mp", "uni")),
    "--nnodes": Unbuilt(missing=_PARALLEL, defaults=_ONE),
    "--node-rank": Unbuilt(missing=_PARALLEL, defaults=("0",)),
    "--api-server-count": Unbuilt(missing="one frontend is built", defaults=_ONE),
    "--quantization": Unbuilt(missing="quantized weights are not built", defaults=("none",)),
    "--kv-cache-dtype": Unbuilt(
        missing="the cache has the model's number type", defaults=("auto", "bfloat16")
    ),
    "--speculative-config": Unbuilt(missing="draft tokens are not built"),
    "--enable-prefix-caching": Unbuilt(missing="prefix caching is not built", is_switch=True),
    "--kv-transfer-config": Unbuilt(missing="moving KV blocks between workers is not built"),
    "--kv-offloading-size": Unbuilt(missing="KV offloading is not built"),
    "--cpu-offload-gb": Unbuilt(missing="offloading weights is not built", defaults=("0",)),
    "--enable-lora": Unbuilt(missing="adapters are not built", is_switch=True),
    "--lora-modules": Unbuilt(missing="adapters are not built"),
    "--async-scheduling": Unbuilt(missing="planning ahead is not built", is_switch=True),
    "--no-enable-chunked-prefill": Unbuilt(
        missing="prompts are always computed in chunks", is_switch=True
    ),
    "--compilation-config": Unbuilt(missing="graph capture is not built"),
    "--additional-config": Unbuilt(missing="no extension reads it", defaults=("{}",)),
    "--chat-template": Unbuilt(missing="the checkpoint's own template is used"),
    "--tokenizer": Unbuilt(missing="the checkpoint's own tokenizer is used"),
    "--load-format": Unbuilt(missing="only safetensors are read", defaults=("auto", "safetensors")),
    "--safetensors-load-strategy": Unbuilt(
        missing="files are mapped and read in order", defaults=("lazy",)
    ),
    "--profiler-config": Unbuilt(missing="profiling through the API is not built"),
    "--seed": Unbuilt(missing="give `seed` in the request", defaults=("0",)),
    "--block-size": Unbuilt(missing="blocks of 128 tokens are built", defaults=("128",)),
    "--guided-decoding-backend": Unbuilt(missing="grammars are not built", defaults=("auto",)),
    "--structured-outputs-config": Unbuilt(missing="grammars are not built"),
    "--scheduling-policy": Unbuilt(missing="requests are served in order", defaults=("fcfs",)),
    "--ssl-keyfile": Unbuilt(missing="TLS is left to a proxy in front"),
    "--ssl-certfile": Unbuilt(missing="TLS is left to a proxy in front"),
}

# Ask for what is so in any case. (No code is ever taken from a checkpoint: nothing to trust.)
ALWAYS_SO: Final = frozenset(
    {
        "--enable-chunked-prefill",
        "--no-enable-prefix-caching",
        "--no-async-scheduling",
        "--enable-auto-tool-choice",
        "--enforce-eager",
        "--trust-remote-code",
        "--no-trust-remote-code",
    }
)

_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-q": "--quantization",
}


def strip_known_options(argv: Sequence[str]) -> list[str]:
    """Flags that are left for the settings, once options of vLLM without effect are taken out.

    A first word that is no flag is the checkpoint, as in `vllm serve DIR`.

    Raises:
        ConfigError: An option asks for something that is not built.
    """
    rest: list[str] = []
    if argv and not argv[0].startswith("-"):
        rest, argv = ["--model", argv[0]], argv[1:]
    words = iter(argv)
    for word in words:
        flag, equals, value = _normal(word).partition("=")
        if flag in ALWAYS_SO:
            continue
        option = UNBUILT.get(flag)
        if option is None:
            rest.append(word)
            continue
        if not option.is_switch and not equals:
            value = next(words, "")
        _refuse(flag, value, option)
    return rest


def _normal(word: str) -> str:
    flag, equals, value = word.partition("=")
    if flag.startswith("--"):
        flag = flag.replace("_", "-")
    return _SHORT.get(flag, flag) + equals + value


def _refuse(flag: str, value: str, option: Unbuilt) -> None:
    if value.lower() in option.defaults:
        return
    hint = f" (only {' or '.join(option.defaults)})" if option.defaults else ""
    shown = flag if option.is_switch else f"{flag} {value}"
    raise ConfigError(f"{shown}: not available: {option.missing}{hint}")
