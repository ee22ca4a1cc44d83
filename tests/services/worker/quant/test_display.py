"""A bar for people, lines for logs, a table at the end."""

import io
import logging

import pytest
from rich.console import Console

from services.worker.quant.convert import ConversionProgress, Outcome
from services.worker.quant.display import (
    LOG_EVERY_S,
    LoggedConversion,
    show_outcome,
    shown_conversion,
)
from services.worker.quant.scheme import Scheme


def progress(done: int, *, layer: int | None = 2, calibrating: bool = False) -> ConversionProgress:
    return ConversionProgress(
        layer=layer, num_bytes=done, total_bytes=1000, is_calibrating=calibrating
    )


def test_a_terminal_gets_a_bar_that_names_the_layer() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with shown_conversion(console, 78) as report:
        report(progress(100, calibrating=True))
        report(progress(500))
    assert "quantizing layer 2 of 78" in out.getvalue()
    assert "0.5/1.0 kB" in out.getvalue()


def test_the_layer_behind_the_last_is_the_mtp_layer(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 2 * LOG_EVERY_S))
    with caplog.at_level(logging.INFO):
        LoggedConversion(78, lambda: next(times))(progress(10, layer=78))
    assert caplog.messages == ["quantizing the MTP layer"]


def test_a_log_gets_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    report = LoggedConversion(78, lambda: now)
    with caplog.at_level(logging.INFO):
        for second in range(11):
            now = second * LOG_EVERY_S / 5
            report(progress(100 * second, calibrating=second < 7))
    assert [record.getMessage() for record in caplog.records] == [
        "calibrating layer 2 of 78",
        "quantizing layer 2 of 78",
    ]
    assert [vars(record)["share"] for record in caplog.records] == ["50%", "100%"]
    assert [vars(record)["remaining_s"] for record in caplog.records] == [5, 0]


def test_without_a_terminal_nothing_is_drawn() -> None:
    out = io.StringIO()
    with shown_conversion(Console(file=out), 3) as report:
        report(progress(1000, layer=None))
    assert out.getvalue() == ""


def test_the_outcome_tells_sizes_and_the_worst_matrices() -> None:
    outcome = Outcome(source_bytes=4_000_000_000, target_bytes=2_000_000_000)
    outcome.count(Scheme.FLOAT, 5_000_000, is_matrix=False)
    outcome.count(Scheme.W8A8, 7_000_000, is_matrix=True)
    outcome.errors.update({f"matrix{number}": number / 100 for number in range(8)})
    out = io.StringIO()
    show_outcome(Console(file=out, width=120), outcome, 12.5)
    text = out.getvalue()
    assert "4.000 GB -> 2.000 GB (50%) in 12.5 s" in text
    assert "matrix7" in text
    assert "matrix3" in text
    assert "matrix2" not in text
    assert "7.00%" in text
