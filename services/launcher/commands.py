"""From the settings of `up` to the command line and environment of each service."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from services.launcher.run_dir import SERVICES, RunDirectory
from services.launcher.settings import UpSettings
from shared.config import has_tables
from shared.parent import PARENT_VARIABLE

# For requests of clients that enter below the frontend; those of the frontend have ended by then.
EDGE_DRAIN_S: Final = 2.0


# What only `up` reads: files without tables, and keys that only the frontend may know.
OWN_VARIABLES: Final = frozenset(
    {"GLM_MESH_CONFIG", "GLM_MESH_UP_CONFIG", "GLM_MESH_API_KEY", "GLM_MESH_UP_API_KEY"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start one service."""

    service: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


def module_command(service: str) -> list[str]:
    """The start of every service's command line.

    `-P` keeps the working directory off the import path, where another `services` may lie.
    """
    return [sys.executable, "-P", "-m", f"services.{service}"]


def build_commands(
    settings: UpSettings,
    run_dir: RunDirectory,
    port: int,
    service_flags: Mapping[str, Sequence[str]],
) -> list[Command]:
    """One command per service, the far end of the chain first.

    Args:
        settings: Of `up`.
        run_dir: Where sockets go.
        port: HTTP port.
        service_flags: Service -> words that options of vLLM become there.
    """
    flags = {
        "worker": _worker_flags(settings),
        "scheduler": _scheduler_flags(settings, run_dir),
        "detokenizer": _detokenizer_flags(settings, run_dir),
        "frontend": _frontend_flags(settings, run_dir, port),
    }
    return [
        Command(
            service=name,
            argv=(
                *module_command(name),
                *_common_flags(settings, run_dir, name),
                *(str(word) for word in flags[name]),
                *service_flags.get(name, ()),
            ),
            environment=_environment(settings, name),
        )
        for name in SERVICES
    ]


def _common_flags(settings: UpSettings, run_dir: RunDirectory, service: str) -> list[str]:
    flags = [
        "--address",
        run_dir.address(service),
        "--health-address",
        run_dir.health_address(service),
        "--admin-address",
        run_dir.admin_address(service),
        "--log-level",
        settings.log_level,
    ]
    if settings.config is not None and has_tables(settings.config):
        flags += ["--config", str(settings.config.absolute())]
    return flags


def _worker_flags(settings: UpSettings) -> list[object]:
    return [
        *("--worker-mode", settings.worker),
        *("--model", settings.checkpoint),
        *("--dtype", settings.dtype),
        *("--device", settings.device),
        *_given("--gpu-memory-utilization", settings.gpu_memory_utilization),
        *_given("--npu-generation", settings.npu_generation),
        *_given("--max-model-len", settings.max_model_len),
        *_given("--max-num-seqs", settings.max_num_seqs),
        *_given("--max-num-batched-tokens", settings.max_num_batched_tokens),
        *_given("--kv-cache-memory-bytes", settings.kv_cache_memory_bytes),
        *_given("--num-threads", settings.num_threads),
    ]


def _scheduler_flags(settings: UpSettings, run_dir: RunDirectory) -> list[object]:
    return [
        *("--worker-address", run_dir.address("worker")),
        *("--drain-timeout-s", EDGE_DRAIN_S),
        *_given("--max-model-len", settings.max_model_len),
        *_given("--max-num-seqs", settings.max_num_seqs),
        *_given("--max-num-batched-tokens", settings.max_num_batched_tokens),
    ]


def _detokenizer_flags(settings: UpSettings, run_dir: RunDirectory) -> list[object]:
    return [
        *("--scheduler-address", run_dir.address("scheduler")),
        *("--model", settings.checkpoint),
    ]


def _frontend_flags(settings: UpSettings, run_dir: RunDirectory, port: int) -> list[object]:
    names = [word for name in settings.served_model_name for word in ("--served-model-name", name)]
    return [
        *("--detokenizer-address", run_dir.address("detokenizer")),
        *("--model", settings.checkpoint),
        *("--host", settings.host),
        *("--port", port),
        *names,
        *_given("--max-model-len", settings.max_model_len),
        *("--reasoning-parser", settings.reasoning_parser),
        *("--tool-call-parser", settings.tool_call_parser),
        *("--worker-mode", settings.worker),
        *("--drain-timeout-s", settings.drain_timeout_s),
    ]


def _given(flag: str, value: object | None) -> tuple[object, ...]:
    return () if value is None else (flag, value)


def _environment(settings: UpSettings, service: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    environment[PARENT_VARIABLE] = str(os.getpid())
    if service == "frontend" and settings.api_key:
        # Not a flag: every user of the machine can read command lines.
        keys = [key.get_secret_value() for key in settings.api_key]
        environment["GLM_MESH_FRONTEND_API_KEY"] = json.dumps(keys)
    return environment
