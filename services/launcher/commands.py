"""From the settings of `up` to the command line and environment of each service."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.launcher.ranks import (
    Layout,
    WorkerRank,
    num_cores,
    own_devices,
    rank_flags,
    threads_per_rank,
)
from services.launcher.run_dir import RunDirectory
from services.launcher.settings import UpSettings
from shared.config import has_tables
from shared.parent import PARENT_VARIABLE

# For requests of clients that enter below the frontend; those of the frontend have ended by then.
EDGE_DRAIN_S: Final = 2.0


# The frontends' metrics library reads it.
METRICS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
DEVICES_VARIABLE: Final = "ASCEND_RT_VISIBLE_DEVICES"

# gRPC reads it when it is imported, so it must be there when a service starts. A service waits for
# few connections: its sockets are watched by the thread that hands messages to the event loop.
# With threads of their own, the default, each message wakes one thread more (docs/adr/0015).
GRPC_VARIABLE: Final = "GRPC_EXPERIMENTS"
GRPC_SWITCHES: Final = ",".join(
    ("-event_engine_client", "-event_engine_listener", "-event_engine_for_all_other_endpoints")
)

# What only `up` reads: files without tables, and keys that only the frontend may know.
OWN_VARIABLES: Final = frozenset(
    {"GLM_MESH_CONFIG", "GLM_MESH_UP_CONFIG", "GLM_MESH_API_KEY", "GLM_MESH_UP_API_KEY"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start one process.

    Attributes:
        service: Its name: that of the service, or of one rank of the worker.
        argv: The command line.
        environment: All variables.
        rank: Which rank, where the worker has several that exchange tensors.
        meeting: The file at which they find each other.
    """

    service: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    rank: WorkerRank | None = None
    meeting: Path | None = None

    @property
    def unit(self) -> str:
        """Processes of one unit are started together, and end together."""
        return self.service if self.rank is None else f"world {self.rank.world}"

    @property
    def title(self) -> str:
        """What it is called where its end is told."""
        return self.service if self.rank is None else f"{self.service}, {self.rank.told}"

    @property
    def kind(self) -> str:
        """The service that it is a process of."""
        return kind_of(self.service)

    @property
    def is_serving(self) -> bool:
        """Whether it serves its contract, health and admin."""
        return self.rank is None or self.rank.is_leader


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
    layout: Layout | None = None,
    num_frontends: int = 1,
) -> list[Command]:
    """One command per process, the far end of the chain first; the worker has one per rank.

    Args:
        settings: Of `up`.
        run_dir: Where sockets go.
        port: HTTP port.
        service_flags: Service -> words that options of vLLM become there.
        layout: Ranks of the worker; one if not given.
        num_frontends: HTTP processes on the port.
    """
    layout = layout or Layout(num_schedulers=settings.scheduler_count)
    chain = {
        **{
            name: ("scheduler", _scheduler_flags(settings, run_dir, layout, number))
            for number, name in enumerate(names_of("scheduler", settings.scheduler_count))
        },
        **{
            name: ("detokenizer", _detokenizer_flags(settings, run_dir))
            for name in names_of("detokenizer", settings.detokenizer_count)
        },
    }
    ranks = [
        _rank_command(settings, run_dir, layout, rank, service_flags.get("worker", ()))
        for rank in layout.ranks()
    ]
    services = [
        Command(
            service=name,
            argv=(
                *module_command(service),
                *_common_flags(settings, run_dir, name),
                *(str(word) for word in words),
                *service_flags.get(service, ()),
            ),
            environment=_environment(settings, service),
        )
        for name, (service, words) in chain.items()
    ]
    own = service_flags.get("frontend", ())
    frontends = [
        _frontend_command(settings, run_dir, port, own, name, num_frontends)
        for name in names_of("frontend", num_frontends)
    ]
    return ranks + services + frontends


def names_of(service: str, count: int) -> list[str]:
    """Names of the processes of one service."""
    return [service, *(f"{service}-{number}" for number in range(1, count))]


def kind_of(name: str) -> str:
    """The service that a process of that name belongs to."""
    return name.partition("-")[0].partition(".")[0]


def _frontend_command(
    settings: UpSettings,
    run_dir: RunDirectory,
    port: int,
    service_flags: Sequence[str],
    name: str,
    num_frontends: int,
) -> Command:
    """One of the HTTP processes; several share port, numbers and kept responses."""
    words = _frontend_flags(settings, run_dir, port)
    environment = _environment(settings, "frontend")
    if num_frontends > 1:
        words += ["--reuse-port", "--response-store-path", run_dir.response_store_path()]
        words += ["--key-limits-path", run_dir.key_limits_path()]
        environment[METRICS_VARIABLE] = str(run_dir.metrics_path())
    return Command(
        service=name,
        argv=(
            *module_command("frontend"),
            *_common_flags(settings, run_dir, name),
            *(str(word) for word in words),
            *service_flags,
        ),
        environment=environment,
    )


def _rank_command(
    settings: UpSettings,
    run_dir: RunDirectory,
    layout: Layout,
    rank: WorkerRank,
    service_flags: Sequence[str],
) -> Command:
    meeting = run_dir.rendezvous_path(rank.world)
    words = [*_worker_flags(settings, layout), *rank_flags(layout, rank, meeting)]
    has_peers = layout.world_size > 1
    environment = _environment(settings, "worker")
    if settings.device == "npu":
        visible = own_devices(layout, rank, environment.get(DEVICES_VARIABLE))
        if visible is not None:
            environment[DEVICES_VARIABLE] = visible
    return Command(
        service=rank.name,
        argv=(
            *module_command("worker"),
            *_common_flags(settings, run_dir, rank.name, is_serving=rank.is_leader),
            *(str(word) for word in words),
            *service_flags,
        ),
        environment=environment,
        rank=rank if has_peers else None,
        meeting=meeting if has_peers else None,
    )


def _common_flags(
    settings: UpSettings, run_dir: RunDirectory, service: str, *, is_serving: bool = True
) -> list[str]:
    flags = ["--address", run_dir.address(service), "--log-level", settings.log_level]
    if is_serving:
        flags += ["--health-address", run_dir.health_address(service)]
        flags += ["--admin-address", run_dir.admin_address(service)]
    if settings.config is not None and has_tables(settings.config):
        flags += ["--config", str(settings.config.absolute())]
    return flags


def _worker_flags(settings: UpSettings, layout: Layout) -> list[object]:
    num_threads = settings.num_threads
    if num_threads is None and layout.num_processes > 1:
        num_threads = threads_per_rank(layout, num_cores())
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
        *_given("--num-threads", num_threads),
    ]


def _scheduler_flags(
    settings: UpSettings, run_dir: RunDirectory, layout: Layout, number: int
) -> list[object]:
    own = [rank for rank in layout.ranks() if rank.scheduler == number]
    leaders = [run_dir.address(rank.name) for rank in own if rank.is_leader]
    return [
        *(["--enable-expert-parallel"] if layout.is_joint else []),
        *(word for address in leaders for word in ("--worker-address", address)),
        *("--num-ranks", layout.world_size),
        *("--drain-timeout-s", EDGE_DRAIN_S),
        *_given("--max-model-len", settings.max_model_len),
        *_given("--max-num-seqs", settings.max_num_seqs),
        *_given("--max-num-batched-tokens", settings.max_num_batched_tokens),
    ]


def _detokenizer_flags(settings: UpSettings, run_dir: RunDirectory) -> list[object]:
    schedulers = names_of("scheduler", settings.scheduler_count)
    return [
        *(w for name in schedulers for w in ("--scheduler-address", run_dir.address(name))),
        *("--model", settings.checkpoint),
    ]


def _frontend_flags(settings: UpSettings, run_dir: RunDirectory, port: int) -> list[object]:
    names = [word for name in settings.served_model_name for word in ("--served-model-name", name)]
    detokenizers = names_of("detokenizer", settings.detokenizer_count)
    return [
        *(w for name in detokenizers for w in ("--detokenizer-address", run_dir.address(name))),
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
    environment.setdefault(GRPC_VARIABLE, GRPC_SWITCHES)
    if service == "frontend" and settings.api_key:
        # Not a flag: every user of the machine can read command lines.
        keys = [key.get_secret_value() for key in settings.api_key]
        environment["GLM_MESH_FRONTEND_API_KEY"] = json.dumps(keys)
    return environment
