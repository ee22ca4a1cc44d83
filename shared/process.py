"""From a command line to a running service, and its exit code: the same for all four.

`__main__` of a service calls `run_process` and holds nothing else.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import uvloop

from shared import log, tracing
from shared.config import SettingsT, parse, unread_variables
from shared.errors import CheckpointError, ConfigError
from shared.parent import die_with_parent

EXIT_USAGE: Final = 2
"""A setting or the checkpoint is wrong: starting again cannot help."""


def run_process(
    settings_class: type[SettingsT],
    serve: Callable[[SettingsT, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a service until SIGTERM or SIGINT; the exit code.

    Args:
        settings_class: What it is told; names the service.
        serve: Serves until the event is set.
        argv: Flags without the program's name; by default those of the process.
    """
    die_with_parent()
    name = settings_class.service
    try:
        settings = parse(settings_class, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, name)
        for line in unread_variables(settings_class, os.environ):
            log.get_logger(__name__).warning("%s", line)
        tracing.configure(name)
        uvloop.run(_until_signal(settings, serve))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return EXIT_USAGE
    finally:
        tracing.shutdown()
    return 0


async def _until_signal(
    settings: SettingsT, serve: Callable[[SettingsT, asyncio.Event], Awaitable[None]]
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)
