import io
import logging
import sys
from collections.abc import Iterator

import pytest

from shared import log


class Screen:
    """What was written to stderr so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stream(capsys: pytest.CaptureFixture[str]) -> Iterator[Screen]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    log.configure("info", "scheduler")
    yield Screen(capsys)
    root.handlers[:] = before
    root.setLevel(level)
    for room in ("services", "shared"):
        logging.getLogger(room).setLevel(logging.NOTSET)


def test_a_record_is_one_line_with_service_and_fields(stream: Screen) -> None:
    log.get_logger("services.x").info(
        "took %d tokens", 3, extra={"request_id": "r-1", "why": "a b"}
    )
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith(' INFO scheduler services.x: took 3 tokens request_id=r-1 why="a b"\n')


def test_text_of_a_user_cannot_forge_a_record(stream: Screen) -> None:
    log.get_logger("x").warning("bad name %s", "a\n2026 ERROR\r\x1b[31m", extra={"field": "x\ny=1"})
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\r" not in text
    assert "\x1b" not in text
    assert r'field="x\ny=1"' in text


def test_traceback_lines_are_indented_under_their_record(stream: Screen) -> None:
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        log.get_logger("x").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("x: failed")
    assert rest
    assert all(line.startswith("    ") for line in rest)


def test_level_can_change_while_running(stream: Screen) -> None:
    log.get_logger("services.x").debug("too early")
    log.set_level("DEBUG")
    log.get_logger("services.x").debug("now")
    log.get_logger("library").debug("never")
    assert [line.split(": ")[1] for line in stream.getvalue().splitlines()] == ["now"]


def test_unknown_level_names_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="debug, info, warning, error"):
        log.set_level("loud")


def test_a_stderr_that_was_swapped_and_closed_is_not_written_to(
    stream: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, fresh = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", closed)
    log.get_logger("x").warning("one")
    closed.close()
    monkeypatch.setattr(sys, "stderr", fresh)
    log.get_logger("x").warning("two")
    assert fresh.getvalue().endswith("x: two\n")
