"""A run directory belongs to one launcher at a time, from before the first change to the last.

The lock is the kernel's, on a file that names its holder: it ends with the launcher however that
ended, so what a killed one left is taken over, once the services that it had have gone too.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.launcher.run_dir import STATE_FILE
from shared.errors import ConfigError

LOCK_FILE: Final = "up.lock"
# Services of a killed launcher are told to end by the kernel, and let running requests end first.
LEFTOVER_LIMIT_S: Final = 30.0
# For so long nobody wonders what the launcher waits for.
QUIET_S: Final = 0.5
_LOOK_S: Final = 0.05


@contextmanager
def claim(path: Path, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold a run directory; `tell` hears what is waited for, where that takes longer.

    Raises:
        ConfigError: Another launcher holds it, or services of a killed one do not end.
    """
    lock = path / LOCK_FILE
    try:
        held = _lock(lock)
    except BlockingIOError:
        raise ConfigError(
            f"--run-dir {path}: a mesh runs there (launcher pid {_holder(lock)}); "
            "choose another directory or stop that one"
        ) from None
    except OSError as error:
        raise ConfigError(f"--run-dir {path}: {LOCK_FILE}: {error.strerror}") from None
    try:
        os.ftruncate(held, 0)
        os.write(held, f"{os.getpid()}\n".encode())
        _wait_for_leftovers(path, tell)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(held)


def _lock(lock: Path) -> int:
    """The open file, locked; no child inherits it."""
    while True:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its last holder may have removed it in between: then it locks nothing any more.
            if _is_at(lock, held):
                return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _is_at(lock: Path, held: int) -> bool:
    try:
        return os.path.samestat(os.fstat(held), lock.stat())
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8").strip() or "unknown"
    except OSError:
        return "unknown"


def _wait_for_leftovers(path: Path, tell: Callable[[str], None]) -> None:
    """Services that still end would lie on the sockets, and remove those of their successors."""
    began, is_told = time.monotonic(), False
    while alive := [pid for pid in _known_pids(path) if _serves_in(path, pid)]:
        pids, waited_s = ", ".join(map(str, alive)), time.monotonic() - began
        if waited_s > LEFTOVER_LIMIT_S:
            raise ConfigError(
                f"--run-dir {path}: services of an earlier mesh still run there (pid {pids})"
            )
        if waited_s > QUIET_S and not is_told:
            is_told = True
            tell(f"services of an earlier mesh end (pid {pids}); waiting for them")
        time.sleep(_LOOK_S)


def _known_pids(path: Path) -> list[int]:
    try:
        page = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return [int(entry["pid"]) for entry in page["services"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # none ran here, or the page is not ours


def _serves_in(path: Path, pid: int) -> bool:
    """Whether that process is still the service: its number may be another's by now."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"unix:{path}/".encode() in words
