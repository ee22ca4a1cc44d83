"""`python -P -m services.worker`: one worker process."""

import asyncio
import os
import sys
from typing import NoReturn

from services.worker.runner import WorldLostError
from services.worker.service import WorkerService
from services.worker.settings import WorkerSettings
from shared.process import run_process

EXIT_WORLD_LOST = 3
"""Another rank of the world, or this one, is lost: all of them are to be started again."""


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when settings or checkpoint are wrong, 3 without a world."""
    try:
        return run_process(WorkerSettings, _serve, argv)
    except WorldLostError as error:
        sys.stderr.write(f"worker: {error}\n")
        _leave_at_once()


def _leave_at_once() -> NoReturn:
    """The runner's thread waits in an exchange that nobody joins: no ordinary exit ends it."""
    sys.stderr.flush()
    os._exit(EXIT_WORLD_LOST)


async def _serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    if settings.is_leader:
        await WorkerService(settings).run(stop)
        return
    from services.worker.follower import FollowerService  # noqa: PLC0415  # needs torch

    await FollowerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
