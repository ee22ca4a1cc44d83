"""The private directory of one running mesh: sockets, logs and a page that says what is where."""

import dataclasses
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.config import MAX_SOCKET_PATH_BYTES
from shared.errors import ConfigError

SERVICES: Final = ("worker", "scheduler", "detokenizer", "frontend")
STATE_FILE: Final = "mesh.json"
# Of directories that nobody named.
RUN_DIR_PREFIX: Final = "glm-mesh-"
_LONGEST_NAME: Final = "detokenizer-63.health.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A process that keeps ending, and when it is tried again (seconds since the epoch)."""

    num_failures: int
    next_start_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Where the sockets and logs of a mesh are; `is_kept` directories outlive it."""

    path: Path
    is_kept: bool

    def address(self, service: str) -> str:
        """Where a service serves its contract."""
        return f"unix:{self.path}/{service}.sock"

    def health_address(self, service: str) -> str:
        """Where a service tells its health."""
        return f"unix:{self.path}/{service}.health.sock"

    def admin_address(self, service: str) -> str:
        """Where a service answers operators."""
        return f"unix:{self.path}/{service}.admin.sock"

    def log_path(self, service: str) -> Path:
        """Where a service's log lines go."""
        return self.path / f"{service}.log"

    def response_store_path(self) -> Path:
        """Where several frontends keep their responses together."""
        return self.path / "responses.db"

    def metrics_path(self) -> Path:
        """Where several frontends count together."""
        return self.path / "metrics"

    def key_limits_path(self) -> Path:
        """Where several frontends count the requests of API keys together."""
        return self.path / "keys"

    def make_shared_paths(self) -> None:
        """Empty folders: counts of an earlier mesh are none of this one's."""
        for folder in (self.metrics_path(), self.key_limits_path()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)

    def rendezvous_path(self, world: int) -> Path:
        """Where the ranks of a world meet; a new file at each of its starts."""
        return self.path / f"world-{world}.meet"

    def write_state(
        self,
        url: str,
        pids: Mapping[str, int],
        silent: Collection[str] = frozenset(),
        failing: Mapping[str, Failing] | None = None,
    ) -> None:
        """Say in `mesh.json` what runs; replaced as a whole, so readers never see half of it.

        Args:
            url: Of the API.
            pids: Name of each process -> its id.
            silent: Processes that serve nothing, and so have no address.
            failing: Those that keep ending.
        """
        failing = failing or {}
        state = {
            "url": url,
            "launcher_pid": os.getpid(),
            "services": {
                name: {
                    "pid": pid,
                    "log": str(self.log_path(name)),
                    **({} if name in silent else self._addresses(name)),
                    **({"failing": dataclasses.asdict(failing[name])} if name in failing else {}),
                }
                for name, pid in pids.items()
            },
        }
        draft = self.path / f"{STATE_FILE}.new"
        draft.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        draft.replace(self.path / STATE_FILE)

    def _addresses(self, service: str) -> dict[str, str]:
        return {
            "address": self.address(service),
            "health_address": self.health_address(service),
            "admin_address": self.admin_address(service),
        }

    def clean(self, *, keep_logs: bool) -> None:
        """Remove what only a running mesh needs; the whole directory if nothing is to be kept."""
        if not self.is_kept and not keep_logs:
            shutil.rmtree(self.path, ignore_errors=True)
            return
        for leftover in (
            *self.path.glob("*.sock"),
            *self.path.glob("*.meet"),
            *self.path.glob("responses.db*"),
            self.path / STATE_FILE,
        ):
            leftover.unlink(missing_ok=True)
        for folder in (self.metrics_path(), self.key_limits_path()):
            shutil.rmtree(folder, ignore_errors=True)


def make_run_directory(wanted: Path | None) -> RunDirectory:
    """Make the directory, private to this user.

    Raises:
        ConfigError: It cannot be made, others can enter it, or socket paths would be too long.
    """
    try:
        if wanted is None:
            path = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=runtime_root()))
        else:
            path = wanted.absolute()
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise ConfigError(f"--run-dir {path}: mode {mode:o} lets others in, 700 is needed")
    except OSError as error:
        raise ConfigError(f"--run-dir {wanted or ''}: {error.strerror}") from None
    if len(f"{path}/{_LONGEST_NAME}".encode()) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"--run-dir {path}: too long for socket paths, choose a shorter one")
    return RunDirectory(path=path, is_kept=wanted is not None)


def runtime_root() -> str | None:
    """The user's own runtime directory where there is one; else the temporary directory."""
    root = os.environ.get("XDG_RUNTIME_DIR", "")
    return root if root and os.access(root, os.W_OK) and len(root) < MAX_SOCKET_PATH_BYTES else None
