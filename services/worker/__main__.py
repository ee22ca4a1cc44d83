"""`python -P -m services.worker`: one worker process."""

import asyncio
import os
import signal
import sys

import uvloop

from services.worker.runner import WorldLostError
from services.worker.service import WorkerService
from services.worker.settings import WorkerSettings
from shared import log, tracing
from shared.config import parse
from shared.errors import CheckpointError, ConfigError
from shared.parent import die_with_parent

EXIT_USAGE = 2
EXIT_WORLD_LOST = 3
"""Another rank of the world, or this one, is lost: all of them are to be started again."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when settings or checkpoint are wrong, 3 without a world."""
    die_with_parent()
    try:
        settings = parse(WorkerSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, WorkerSettings.service)
        tracing.configure(WorkerSettings.service)
        uvloop.run(_serve(settings))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"worker: {error}\n")
        return EXIT_USAGE
    except WorldLostError as error:
        sys.stderr.write(f"worker: {error}\n")
        _leave_at_once()
    finally:
        tracing.shutdown()
    return 0


def _leave_at_once() -> None:
    """The runner's thread waits in an exchange that nobody joins: no ordinary exit ends it."""
    tracing.shutdown()
    sys.stderr.flush()
    os._exit(EXIT_WORLD_LOST)


async def _serve(settings: WorkerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.is_leader:
        await WorkerService(settings).run(stop)
        return
    from services.worker.follower import FollowerService  # noqa: PLC0415  # needs torch

    await FollowerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
