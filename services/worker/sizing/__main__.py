"""`python -P -m services.worker.sizing`: size a deployment.

Exits with 0 if all that was asked fits, 1 if it does not, 2 when the question is wrong.
"""

import json
import os
import sys
from typing import Final

from rich.console import Console

from services.worker.sizing.advice import Advice, advise
from services.worker.sizing.command_line import read_command_line
from services.worker.sizing.plan import Plan, make_plan
from services.worker.sizing.report import show
from services.worker.sizing.report_json import as_json
from services.worker.sizing.request import build_deployment
from services.worker.sizing.settings import PlanSettings
from shared import log
from shared.config import parse
from shared.errors import CheckpointError, ConfigError

EXIT_TOO_SMALL: Final = 1
EXIT_USAGE: Final = 2
# Where there is no terminal: wide enough for the longest suggestion.
_PLAIN_WIDTH: Final = 200


def main(argv: list[str] | None = None) -> int:
    """Plan and print; the exit code."""
    try:
        line = read_command_line(sys.argv[1:] if argv is None else argv)
        settings = parse(PlanSettings, line.flags)
        log.configure(settings.log_level, PlanSettings.service)
        plan = make_plan(build_deployment(settings, os.environ))
    except (ConfigError, CheckpointError) as error:
        sys.stderr.write(f"plan: {error}\n")
        return EXIT_USAGE
    _print(plan, advise(plan), is_json=settings.output == "json")
    if line.left_out:
        sys.stderr.write(f"no bearing on memory: {', '.join(line.left_out)}\n")
    return 0 if plan.fits else EXIT_TOO_SMALL


def _print(plan: Plan, advice: Advice, *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(json.dumps(as_json(plan, advice), indent=2) + "\n")
        return
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    show(plan, advice, Console(width=width, highlight=False))


if __name__ == "__main__":
    sys.exit(main())
