"""`python -P -m services.worker`: one worker process."""

import asyncio
import signal
import sys

import uvloop

from services.worker.service import WorkerService
from services.worker.settings import WorkerSettings
from shared import log, tracing
from shared.config import parse
from shared.errors import CheckpointError, ConfigError
from shared.parent import die_with_parent

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when settings or checkpoint are wrong."""
    die_with_parent()
    try:
        settings = parse(WorkerSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, WorkerSettings.service)
        tracing.configure(WorkerSettings.service)
        uvloop.run(_serve(settings))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"worker: {error}\n")
        return EXIT_USAGE
    finally:
        tracing.shutdown()
    return 0


async def _serve(settings: WorkerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await WorkerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
