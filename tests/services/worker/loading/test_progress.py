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


def test_a_terminal_sees_a_bar_with_bytes_and_rate() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with shown_progress("glm", console) as show:
        for share in (0.1, 0.5, 1.0):
            show(report(share))
    text = screen.getvalue()
    assert "loading glm" in text
    assert "1.0/1.0 kB" in text
    assert "B/s" in text


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, float, int | None]]:
    fields = [record.__dict__ for record in caplog.records]
    return [(one["share"], one["gb_per_s"], one["remaining_s"]) for one in fields]


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    show = LoggedProgress("glm", lambda: now)
    with caplog.at_level(logging.INFO):
        show(report(0.1))
        assert not caplog.records
        now += LOG_EVERY_S
        show(report(0.25))
        show(report(0.3))
    assert [share for share, _, _ in lines(caplog)] == ["25%"]


def test_a_line_has_the_rate_of_now_and_the_time_that_remains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    show = LoggedProgress("glm", lambda: now)
    with caplog.at_level(logging.INFO):
        for gigabytes in (0, 20, 40, 40):
            now += 10.0
            show(
                LoadProgress(
                    num_tensors=1,
                    total_tensors=2,
                    num_bytes=gigabytes * 10**9,
                    total_bytes=100 * 10**9,
                )
            )
    # 20 GB in the second ten seconds; after that 80 GB are left at a mean of 1 GB/s. At last it
    # stalls, which the rate of now shows and the mean does not.
    assert lines(caplog) == [
        ("0%", 0.0, None),
        ("20%", 2.0, 80),
        ("40%", 2.0, 45),
        ("40%", 0.0, 60),
    ]


def test_without_a_terminal_nothing_is_drawn() -> None:
    screen = io.StringIO()
    with shown_progress("glm", Console(file=screen)) as show:
        show(report(1.0))
    assert not screen.getvalue()
