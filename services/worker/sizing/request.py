"""From flags, environment and checkpoint files to the deployment that is asked about."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from services.worker.capacity import CPU_KV_CACHE_BYTES
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import MAX_SPECULATIVE_TOKENS, ModelConfig
from services.worker.parallel.hccl import read_buffer_mib
from services.worker.parallel.topology import Topology, read_partition
from services.worker.quant.scheme import QuantDescription
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.hardware import HARDWARE
from services.worker.sizing.recipe import describe
from services.worker.sizing.settings import PlanSettings
from shared.errors import ConfigError

_ELEMENT_BYTES: Final = {"bfloat16": 2, "float32": 4}
_MAX_NUM_SEQS: Final = 256
_AXES: Final = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "decode_context_parallel_size",
)
_SWITCHES: Final = (
    "enable_sparse_sfa_c8",
    "enable_sparse_li_c8",
    "enable_dsa_cp",
    "enable_flashcomm1",
)
_NO_GRAPHS: Final = "NONE"
_EXPERTS: Final = ".mlp.experts."
_FIRST_EXPERT: Final = ".mlp.experts.0."


def build_deployment(settings: PlanSettings, environment: Mapping[str, str]) -> Deployment:
    """The deployment that the settings describe.

    Raises:
        ConfigError: Settings contradict each other or the model.
        CheckpointError: The checkpoint's description cannot be read.
    """
    config, folder = _read_model(settings.model)
    extras = _Extras.read(settings)
    hardware = HARDWARE[settings.hardware]
    scheme, quantization = _weights(settings, config, folder)
    drafts = extras.num_speculative_tokens
    seqs = settings.max_num_seqs or min(_MAX_NUM_SEQS, settings.max_num_batched_tokens)
    budget = settings.kv_cache_memory_bytes
    if budget is None and not hardware.is_npu:
        budget = CPU_KV_CACHE_BYTES
    return Deployment(
        config=config,
        scheme=scheme,
        quantization=quantization,
        topology=_topology(settings, environment),
        hardware=hardware,
        max_model_len=settings.max_model_len or config.max_position_embeddings,
        element_bytes=_element_bytes(settings, config),
        max_num_seqs=seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_speculative_tokens=drafts,
        cache=CacheFormat(
            sparse_sfa_c8=extras.switches["enable_sparse_sfa_c8"],
            sparse_li_c8=extras.switches["enable_sparse_li_c8"],
            generation="a2" if hardware.name == "a2" else "a3",
        ),
        is_dsa_cp=extras.switches["enable_dsa_cp"],
        is_flashcomm=extras.switches["enable_flashcomm1"]
        or environment.get("VLLM_ASCEND_ENABLE_FLASHCOMM1") == "1",
        is_eager=extras.is_eager,
        capture_sizes=extras.capture_sizes,
        max_capture_size=extras.max_capture_size,
        utilization=settings.gpu_memory_utilization,
        hccl_mib=_hccl_mib(settings, environment),
        kv_cache_bytes=budget,
        num_full_seqs=settings.at_least or settings.max_num_seqs or 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extras:
    """What may be said by a flag or inside vLLM's JSON."""

    num_speculative_tokens: int
    switches: Mapping[str, bool]
    is_eager: bool
    capture_sizes: tuple[int, ...] | None
    max_capture_size: int | None

    @classmethod
    def read(cls, settings: PlanSettings) -> "_Extras":
        additional = _read_object("--additional-config", settings.additional_config)
        compilation = _read_object("--compilation-config", settings.compilation_config)
        names = _SWITCHES
        is_off = compilation.get("cudagraph_mode") == _NO_GRAPHS
        return cls(
            num_speculative_tokens=_drafts(settings),
            switches={name: _switch(settings, additional, name) for name in names},
            is_eager=settings.enforce_eager or is_off,
            capture_sizes=_capture_sizes(compilation),
            max_capture_size=_max_capture_size(compilation),
        )


def _read_model(path: Path) -> tuple[ModelConfig, Path]:
    """The model's sizes, and the folder in which a description may lie."""
    if path.is_file():
        try:
            return ModelConfig.from_dict(_load(path)), path.parent
        except ConfigError as error:
            raise ConfigError(f"--model {path}: {error}") from error
    if not path.is_dir():
        raise ConfigError(f"--model {path}: no such directory or file")
    return ModelConfig.from_dir(path), path


def _load(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold one JSON object")
    return values


def _weights(
    settings: PlanSettings, config: ModelConfig, folder: Path
) -> tuple[str, QuantDescription]:
    if settings.scheme != "auto":
        return settings.scheme, describe(config, settings.scheme)
    found = QuantDescription.from_dir(folder)
    if not found.is_quantized:
        return "bf16", found
    # The first expert tells for all; a plan is made many times, and they are most of the names.
    types = {
        name: kind
        for name, kind in found.types.items()
        if _EXPERTS not in name or _FIRST_EXPERT in name
    }
    return "described", replace(found, types=types)


def _element_bytes(settings: PlanSettings, config: ModelConfig) -> int:
    name = config.dtype if settings.dtype == "auto" else settings.dtype
    if name not in _ELEMENT_BYTES:
        raise ConfigError(
            f"config.json: dtype={name!r}: must be one of {', '.join(_ELEMENT_BYTES)}; --dtype "
            "overrides it"
        )
    if name == "float32" and settings.hardware != "cpu":
        raise ConfigError(
            f"--dtype float32 and --hardware {settings.hardware}: the device's operators take "
            "bfloat16 only"
        )
    return _ELEMENT_BYTES[name]


def _topology(settings: PlanSettings, environment: Mapping[str, str]) -> Topology:
    given = {name: size for name in _AXES if (size := getattr(settings, name)) is not None}
    text = settings.pp_layer_partition
    if settings.topology is not None:
        others = [*given, *(["enable_expert_parallel"] if settings.enable_expert_parallel else [])]
        others += ["pp_layer_partition"] if text is not None else []
        if others:
            flag = "--" + others[0].replace("_", "-")
            raise ConfigError(f"--topology {settings.topology} and {flag}: give one of them")
        return Topology.parse(settings.topology)
    is_staged = given.get("pipeline_parallel_size", 1) > 1
    if text is None and is_staged:
        text = environment.get("VLLM_PP_LAYER_PARTITION")
    return Topology(
        **given,
        enable_expert_parallel=settings.enable_expert_parallel,
        layer_partition=read_partition(text) if text else (),
    )


def _hccl_mib(settings: PlanSettings, environment: Mapping[str, str]) -> int:
    if settings.hccl_buffsize is not None:
        return settings.hccl_buffsize
    return read_buffer_mib(environment)


def _read_object(flag: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} {text!r}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{flag} {text!r}: must be one JSON object")
    return values


def _drafts(settings: PlanSettings) -> int:
    own = settings.num_speculative_tokens
    flag = "--speculative-config"
    values = _read_object(flag, settings.speculative_config)
    if settings.speculative_config is None:
        return own or 0
    said = values.get("num_speculative_tokens")
    if (
        isinstance(said, bool)
        or not isinstance(said, int)
        or not 0 <= said <= MAX_SPECULATIVE_TOKENS
    ):
        raise ConfigError(
            f"{flag}: num_speculative_tokens={said!r}: must be a whole number of at most "
            f"{MAX_SPECULATIVE_TOKENS}"
        )
    if own is not None and own != said:
        raise ConfigError(f"--num-speculative-tokens {own} and {flag} with {said}: give one")
    return said


def _switch(settings: PlanSettings, additional: Mapping[str, Any], name: str) -> bool:
    is_set: bool = getattr(settings, name)
    said = additional.get(name, is_set)
    if not isinstance(said, bool):
        raise ConfigError(f"--additional-config: {name}={said!r}: must be true or false")
    if is_set and not said:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} and --additional-config with {name}=false: give one")
    return said


def _capture_sizes(compilation: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = compilation.get("cudagraph_capture_sizes")
    if sizes is None:
        return None
    is_list = isinstance(sizes, list) and sizes
    if not is_list or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"--compilation-config: cudagraph_capture_sizes={sizes!r}: must be a list of counts"
        )
    return tuple(sizes)


def _max_capture_size(compilation: Mapping[str, Any]) -> int | None:
    size = compilation.get("max_cudagraph_capture_size")
    if size is None:
        return None
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"--compilation-config: max_cudagraph_capture_size={size!r}: must be a count"
        )
    return size
