"""`python -P -m services.frontend`: one frontend process."""

import sys

from services.frontend.process import run
from services.frontend.settings import FrontendSettings
from shared.process import run_process


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; 2 when a setting or the checkpoint is wrong."""
    return run_process(FrontendSettings, run, argv)


if __name__ == "__main__":
    sys.exit(main())
