import io
import logging

import pytest
from rich.console import Console

from services.worker.loading.progress import (
    LOG_EVERY_S,
    LoadProgress,
    LoggedProgress,
    shown_progress,
)


def report(share: float) -> LoadProgress:
    return LoadProgress(
        num_tensors=1, total_tensors=2, num_bytes=int(share * 1000), total_bytes=1000
    )


def test_a_terminal_sees_a_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with shown_progress("glm", console) as show:
        show(report(0.5))
        show(report(1.0))
    assert "loading glm" in screen.getvalue()


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    show = LoggedProgress("glm", lambda: now)
    with caplog.at_level(logging.INFO):
        show(report(0.1))
        assert not caplog.records
        now += LOG_EVERY_S
        show(report(0.25))
        show(report(0.3))
    assert [record.share for record in caplog.records] == ["25%"]  # type: ignore[attr-defined]


def test_without_a_terminal_nothing_is_drawn() -> None:
    screen = io.StringIO()
    with shown_progress("glm", Console(file=screen)) as show:
        show(report(1.0))
    assert not screen.getvalue()
