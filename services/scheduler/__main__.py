"""`python -P -m services.scheduler`: one scheduler process."""

import asyncio
import sys

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared.process import run_process


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when a setting is wrong."""
    return run_process(SchedulerSettings, _serve, argv)


async def _serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    await SchedulerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
