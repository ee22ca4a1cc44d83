"""Where the ranks of a world find each other: a file on one machine, or a port of rank 0.

Nothing here is kept after a start: a world that is started again meets at a new file or at a port
that is free again.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from torch.distributed import (  # type: ignore[attr-defined]  # torch lists no exports
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from shared.errors import ConfigError

_POLL_S = 0.05
_FLAG = "--rendezvous"


class JoinError(Exception):
    """The ranks of a world did not come together."""


def open_store(address: str, *, rank: int, size: int, timeout_s: float) -> Store:
    """The store that all ranks write to and read from.

    Args:
        address: ``file:///path`` or ``tcp://host:port``; rank 0 listens there.
        rank: This rank.
        size: Ranks of the world.
        timeout_s: How long to wait for rank 0.

    Raises:
        ConfigError: The address is none of the two, or its port or folder cannot be used.
        JoinError: Nobody answers.
    """
    parts = urlsplit(address)
    timeout = timedelta(seconds=timeout_s)
    if parts.scheme == "file" and parts.path and not parts.netloc:
        path = Path(parts.path)
        if not path.parent.is_dir():
            raise ConfigError(f"{_FLAG} {address}: {path.parent} is not a folder")
        return FileStore(str(path), size)
    if parts.scheme != "tcp" or not parts.hostname or parts.port is None:
        raise ConfigError(f"{_FLAG} {address}: must be file:///path or tcp://host:port")
    if rank == 0:
        try:
            return TCPStore(
                parts.hostname, parts.port, size, True, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:
            raise ConfigError(f"{_FLAG} {address}: rank 0 cannot listen: {error}") from None
    # torch would write a page about every attempt of a rank that is earlier than rank 0.
    _wait_for_listener(parts.hostname, parts.port, timeout_s)
    return TCPStore(
        parts.hostname, parts.port, size, False, timeout=timeout, wait_for_workers=False
    )


def _wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(_POLL_S, timeout_s)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise JoinError(
                    f"rank 0 does not answer at {host}:{port} after {timeout_s:g} s: {error}"
                ) from None
            time.sleep(_POLL_S)
        else:
            return


def gather(
    store: Store,
    topic: str,
    text: str,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    is_stopping: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Every rank's text, in order of the ranks, once all have told theirs.

    Raises:
        JoinError: Some did not in time; it names them.
    """
    shelf = PrefixStore(topic, store)
    shelf.set(str(rank), text)
    missing = [str(other) for other in range(size)]
    started = time.monotonic()
    while missing := [other for other in missing if not shelf.check([other])]:
        waited_s = time.monotonic() - started
        if waited_s > timeout_s or is_stopping():
            raise JoinError(
                f"ranks {', '.join(missing)} of {size} are missing after {waited_s:.1f} s ({topic})"
            )
        time.sleep(_POLL_S)
    return [shelf.get(str(other)).decode() for other in range(size)]
