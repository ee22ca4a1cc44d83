"""What the person at the terminal sees: progress while starting, then events as lines.

On a terminal the progress is one live line; elsewhere each change is a line, fit for a log.
"""

import contextlib
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from rich.status import Status

MAX_DETAIL_CHARS: Final = 80


class Display:
    """Writes to one stream; owns the live line while there is one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Look at the stream to decide between live line and lines."""
        self._stream = sys.stdout if stream is None else stream
        self._started = time.monotonic()
        self._shown: dict[str, str] = {}
        self._status: Status | None = None
        if self._stream.isatty():
            self._status = _live_status(self._stream)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def progress(self, states: Mapping[str, str], detail: str = "") -> None:
        """Show the state of each service, and on a terminal what the slowest is doing."""
        if self._status is not None:
            text = "  ".join(f"{name} {state}" for name, state in states.items())
            # What a log says must not be read as markup.
            self._status.update(f"{text}  {detail[:MAX_DETAIL_CHARS].replace('[', '(')}")
        else:
            for name, state in states.items():
                if self._shown.get(name) != state:
                    self.line(f"{name}: {state}")
        self._shown = dict(states)

    def end_progress(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def line(self, text: str) -> None:
        """One event."""
        if self._status is not None:
            self._status.console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        # A reader that went away (a closed pipe, a lost terminal) must not end the mesh.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text + "\n")
            self._stream.flush()

    def lines(self, texts: Sequence[str]) -> None:
        """Several lines in a row."""
        for text in texts:
            self.line(text)


def _live_status(stream: TextIO) -> "Status":
    from rich.console import Console  # noqa: PLC0415  # only a terminal pays the import

    status = Console(file=stream).status("starting")
    status.start()
    return status


def address_page(
    *,
    url: str,
    model: str,
    directory: str,
    pids: Mapping[str, int],
    seconds: float,
    version: str,
    silent: Collection[str] = frozenset(),
) -> list[str]:
    """What is where, once everything is ready.

    Args:
        url: Of the API.
        model: Its name there.
        directory: Of sockets and logs.
        pids: Name of each process -> its id.
        seconds: From the start.
        version: Of the mesh.
        silent: Processes that serve nothing: ranks that are led by another.
    """
    page = [
        f"glm-mesh {version} serves {model} at {url}/v1 (ready in {seconds:.1f} s)",
        f"  API page  {url}/docs      metrics  {url}/metrics",
    ]
    width = max(12, *map(len, pids))
    page += [
        f"  {name:<{width}} pid {pid:<8} "
        + (
            f"led; log {directory}/{name}.log"
            if name in silent
            else f"unix:{directory}/{name}.sock"
        )
        for name, pid in pids.items()
    ]
    page += [
        f"  beside each socket: NAME.health.sock, NAME.admin.sock; logs {directory}/NAME.log",
        "Ctrl-C stops everything.",
    ]
    return page
