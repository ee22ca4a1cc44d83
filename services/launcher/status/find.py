"""Which processes to ask: those of a mesh that `up` runs, or those at given addresses."""

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher.run_dir import RUN_DIR_PREFIX, STATE_FILE, Failing, runtime_root
from services.launcher.status.mesh import Target
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A mesh before anybody was asked."""

    targets: Sequence[Target]
    url: str = ""


def find(run_dir: Path | None, admin_addresses: Sequence[str]) -> Found:
    """The mesh that is meant.

    Args:
        run_dir: Of `up`; None for the one mesh that this user runs here.
        admin_addresses: Where processes answer operators, in place of a directory.

    Raises:
        ConfigError: There is none, more than one, or the directory is none of a mesh.
    """
    if admin_addresses:
        if run_dir is not None:
            raise ConfigError("--admin-address and --run-dir exclude each other")
        return Found(targets=[Target(name=entry, admin_address=entry) for entry in admin_addresses])
    return _read(run_dir if run_dir is not None else _the_only_one())


def _the_only_one() -> Path:
    root = Path(runtime_root() or tempfile.gettempdir())
    found = [page.parent for page in sorted(root.glob(f"{RUN_DIR_PREFIX}*/{STATE_FILE}"))]
    running = [path for path in found if _is_running(path)]
    if not running:
        raise ConfigError(
            f"no mesh runs here ({root}/{RUN_DIR_PREFIX}*): --run-dir names the directory of one, "
            "--admin-address processes that were started one by one"
        )
    if len(running) > 1:
        names = ", ".join(map(str, running))
        raise ConfigError(f"{len(running)} meshes run here, --run-dir says which: {names}")
    return running[0]


def _is_running(path: Path) -> bool:
    """Whether the mesh is this user's and its launcher lives."""
    try:
        page = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        os.kill(int(page["launcher_pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _read(path: Path) -> Found:
    page = path / STATE_FILE
    try:
        content: dict[str, Any] = json.loads(page.read_text(encoding="utf-8"))
        services: dict[str, dict[str, Any]] = content["services"]
        return Found(
            targets=[
                Target(
                    name=name,
                    admin_address=entry.get("admin_address"),
                    health_address=entry.get("health_address"),
                    pid=int(entry["pid"]),
                    failing=Failing(**entry["failing"]) if "failing" in entry else None,
                )
                for name, entry in services.items()
            ],
            url=str(content["url"]),
        )
    except FileNotFoundError:
        raise ConfigError(
            f"--run-dir {path}: no mesh runs there ({STATE_FILE} is missing)"
        ) from None
    except OSError as error:
        raise ConfigError(f"{page}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{page}: not what `glm-mesh up` writes") from None
