"""`glm-mesh status`: one look at a running mesh, from outside.

Exits with 0 if all of it is ready, 1 if something is not, 2 when there is nothing to look at.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from services.launcher.status.admin_client import ask_all
from services.launcher.status.find import find
from services.launcher.status.mesh import MeshStatus
from services.launcher.status.show import as_json, as_table
from shared import log
from shared.config import Address, ProcessSettings, check_distinct, parse, split_addresses

EXIT_NOT_READY: Final = 1
# The short form of the flag, as programs mostly have it.
_JSON: Final = {"--json": "--output=json"}


class StatusSettings(ProcessSettings):
    """Show the processes and replicas of a running mesh; exits with 0 if all are ready."""

    service: ClassVar[str] = "status"

    run_dir: Path | None = Field(
        default=None,
        description="Directory of `glm-mesh up`; the mesh that runs here if there is only one.",
    )
    admin_address: Annotated[
        list[Address], BeforeValidator(split_addresses), AfterValidator(check_distinct)
    ] = Field(
        default=[],
        description="Admin address of a process that was started by hand; may be repeated.",
    )
    output: Literal["table", "json"] = Field(
        default="table", description="--json is --output json."
    )
    timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="A process that takes longer to answer is away."
    )


def run_status(argv: Sequence[str]) -> int:
    """Ask every process and print what it says; the exit code.

    Raises:
        ConfigError: There is no mesh to look at, or a flag is wrong.
    """
    settings = parse(StatusSettings, [_JSON.get(word, word) for word in argv])
    log.configure(settings.log_level, StatusSettings.service)
    found = find(settings.run_dir, settings.admin_address)
    rows = asyncio.run(ask_all(found.targets, settings.timeout_s))
    status = MeshStatus(rows=rows, url=found.url)
    if settings.output == "json":
        sys.stdout.write(json.dumps(as_json(status), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(as_table(status)) + "\n")
    return 0 if status.is_ready else EXIT_NOT_READY
