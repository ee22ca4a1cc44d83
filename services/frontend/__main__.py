"""Starts the frontend: `python -P -m services.frontend --help`."""

import sys

import uvloop

from services.frontend.process import run
from services.frontend.settings import FrontendSettings
from shared import log, tracing
from shared.config import parse
from shared.errors import CheckpointError, ConfigError
from shared.parent import die_with_parent


def main(argv: list[str] | None = None) -> int:
    """Run until told to stop; 2 when a setting or the checkpoint is wrong."""
    die_with_parent()
    try:
        settings = parse(FrontendSettings, sys.argv[1:] if argv is None else argv)
        log.configure(settings.log_level, settings.service)
        tracing.configure(settings.service)
        uvloop.run(run(settings))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"frontend: {error}\n")
        return 2
    finally:
        tracing.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
