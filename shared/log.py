"""Logging of one service: a record is one line on stderr, its fields follow as `name=value`.

    2026-03-01T12:00:00.123Z INFO scheduler services.scheduler.core: admitted request_id=r-1

Fields come from `extra={...}`. Line breaks inside a message are escaped, so nobody who sends text
can forge a record; the lines of a traceback start with four blanks and belong to the record above.
"""

import json
import logging
import sys
import time
from typing import Final, Literal, TextIO

LogLevel = Literal["debug", "info", "warning", "error"]

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_OWN_ROOMS: Final = ("services", "shared")
# Attributes every record has; what else it carries came in as a field.
_STANDARD: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}
)


class LineFormatter(logging.Formatter):
    """Writes a record as one line."""

    def __init__(self, service: str) -> None:
        """Name the service that speaks."""
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as text, without the final line break."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [
            f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {self._service} {record.name}:",
            _one_line(record.getMessage()),
        ]
        parts += [
            f"{name}={_field(value)}"
            for name, value in vars(record).items()
            if name not in _STANDARD
        ]
        line = " ".join(parts)
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line += "\n" + "\n".join(f"    {row}" for row in trace.splitlines())
        return line


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is at that moment: whoever swaps it also closes the old one."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(level: str, service: str) -> None:
    """Send all records of the process to stderr, from `level` on.

    Called once by `__main__`; a second call replaces the first.
    """
    handler = _StderrHandler()
    handler.setFormatter(LineFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of the process; ValueError for an unknown name."""
    number = _LEVELS.get(level.lower())
    if number is None:
        raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}")
    # Libraries never say more than INFO: their debug lines would bury ours.
    logging.getLogger().setLevel(max(number, logging.INFO))
    for room in _OWN_ROOMS:
        logging.getLogger(room).setLevel(number)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; `name` is its `__name__`."""
    return logging.getLogger(name)


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else json.dumps(char)[1:-1].replace("\x7f", "\\u007f")
        for char in text
    )


def _field(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(char in ' "=' for char in text):
        return text
    return json.dumps(text)
