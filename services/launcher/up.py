"""`glm-mesh up`: the whole mesh on this machine, in the foreground."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Final

from services.launcher.claim import claim
from services.launcher.commands import build_commands
from services.launcher.display import Display
from services.launcher.options.serve import help_text
from services.launcher.options.start import Start, read_start
from services.launcher.overruled import overruled
from services.launcher.run_dir import RunDirectory, make_run_directory
from services.launcher.settings import UpSettings
from services.launcher.supervisor import Supervisor
from shared.config import unread_variables
from shared.errors import ConfigError

_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def run_up(argv: Sequence[str]) -> int:
    """Start, watch and stop; the exit code.

    Raises:
        ConfigError: A flag is wrong or asks for what is not built, or the port or the directory
            is another's.
    """
    try:
        start = read_start(argv, os.environ)
    except SystemExit:  # --help was printed
        sys.stdout.write(help_text())
        raise
    _note((*start.lines, *unread_variables(UpSettings, os.environ)))
    settings = start.settings
    with claim_port(settings.host, settings.port) as port:
        run_dir = make_run_directory(settings.run_dir)
        # gRPC would print a line at each start of a child; children are started by exec anyway.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        with claim(run_dir.path, lambda line: _note([line])):
            return asyncio.run(_run(start, run_dir, port.getsockname()[1]))


def _note(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stderr.write(f"glm-mesh: note: {line}\n")


async def _run(start: Start, run_dir: RunDirectory, port: int) -> int:
    settings = start.settings
    if start.num_frontends > 1:
        run_dir.make_shared_paths()
    commands = build_commands(
        settings, run_dir, port, start.service_flags, start.layout, start.num_frontends
    )
    _note(overruled(commands, os.environ, settings.config))
    display = Display()
    supervisor = Supervisor(
        commands,
        run_dir,
        display,
        url=base_url(settings.host, port),
        model=", ".join(settings.served_model_name) or settings.checkpoint.name,
        version=metadata.version("glm-mesh"),
        drain_timeout_s=settings.drain_timeout_s,
    )
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            supervisor.kill_all()
        else:
            display.line("stopping; running requests may end (once more: end everything at once)")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    return await supervisor.run(stop, start_timeout_s=settings.start_timeout_s)


def claim_port(host: str, port: int) -> socket.socket:
    """Keep a port before anything is started; port 0 picks a free one.

    As long as the socket is open the port is nobody else's, whatever ports the other services and
    ranks are given while they start; the frontend can listen on it all the same, again and again.

    Raises:
        ConfigError: It is taken, or the host is no address of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        kept = socket.socket(family, socket.SOCK_STREAM)
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind(address)
        except BaseException:
            kept.close()
            raise
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(
            f"--port {port} of {host}: {error.strerror}; choose another with --port"
        ) from None
    return kept


def base_url(host: str, port: int) -> str:
    """The URL to try first."""
    shown = _WILDCARDS.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
