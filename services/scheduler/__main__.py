"""`python -P -m services.scheduler`: one scheduler process."""

import asyncio
import signal
import sys

import uvloop

from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings
from shared import log, tracing
from shared.config import parse
from shared.errors import ConfigError
from shared.parent import die_with_parent

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when a setting is wrong."""
    die_with_parent()
    try:
        settings = parse(SchedulerSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, SchedulerSettings.service)
        tracing.configure(SchedulerSettings.service)
        uvloop.run(_serve(settings))
    except ConfigError as error:
        sys.stderr.write(f"scheduler: {error}\n")
        return EXIT_USAGE
    finally:
        tracing.shutdown()
    return 0


async def _serve(settings: SchedulerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await SchedulerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
