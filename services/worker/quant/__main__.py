"""`python -P -m services.worker.quant`: quantize a checkpoint.

Exits with 0 when the checkpoint is there, 2 when settings or source are wrong; whatever ends it
early takes away what it had written.
"""

import signal
import sys
from types import FrameType
from typing import Final, NoReturn

from rich.console import Console

from services.worker.quant.command import run
from services.worker.quant.settings import QuantizeSettings
from shared import log
from shared.config import parse
from shared.errors import CheckpointError, ConfigError

EXIT_USAGE: Final = 2


def main(argv: list[str] | None = None) -> int:
    """Quantize; the exit code."""
    try:
        settings = parse(QuantizeSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, QuantizeSettings.service)
        signal.signal(signal.SIGTERM, _stop)
        run(settings, Console(stderr=True))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"quantize: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("quantize: interrupted\n")
        return 128 + signal.SIGINT
    return 0


def _stop(number: int, _: FrameType | None) -> NoReturn:
    """End as an exception does, so that what was begun is taken away."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
