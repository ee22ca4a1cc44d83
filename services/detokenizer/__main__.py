"""`python -P -m services.detokenizer`: one detokenizer process."""

import asyncio
import signal
import sys

import uvloop

from services.detokenizer.service import DetokenizerService
from services.detokenizer.settings import DetokenizerSettings
from shared import log, tracing
from shared.config import parse
from shared.errors import CheckpointError, ConfigError
from shared.parent import die_with_parent

EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when a setting or the checkpoint is wrong."""
    die_with_parent()
    try:
        settings = parse(DetokenizerSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, DetokenizerSettings.service)
        tracing.configure(DetokenizerSettings.service)
        uvloop.run(_serve(settings))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"detokenizer: {error}\n")
        return EXIT_USAGE
    finally:
        tracing.shutdown()
    return 0


async def _serve(settings: DetokenizerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await DetokenizerService(settings).run(stop)


if __name__ == "__main__":
    sys.exit(main())
