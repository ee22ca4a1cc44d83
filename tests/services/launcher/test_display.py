import io
import time

from services.launcher.display import Display, address_page


def test_without_a_terminal_each_change_is_one_line() -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.progress({"worker": "starting", "frontend": "starting"})
    display.progress({"worker": "ready", "frontend": "starting"})
    display.progress({"worker": "ready", "frontend": "starting"})
    display.end_progress()
    assert stream.getvalue().splitlines() == [
        "worker: starting",
        "frontend: starting",
        "worker: ready",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_events_do_not_break_the_live_line() -> None:
    stream = Terminal()
    display = Display(stream)
    display.progress({"worker": "starting"}, "loading [weights] share=40%")
    time.sleep(0.2)
    display.line("[bold]an event[/bold]")
    display.end_progress()
    display.line("after")
    assert "[bold]an event[/bold]\n" in stream.getvalue()
    assert "worker starting  loading (weights] share=40%" in stream.getvalue()
    assert stream.getvalue().endswith("after\n")


def test_a_reader_that_went_away_does_not_matter() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    Display(Closed()).line("x")


def test_the_page_says_what_is_where() -> None:
    page = "\n".join(
        address_page(
            url="http://h:1",
            model="m",
            directory="/r",
            pids={"worker": 7, "worker.1": 8},
            seconds=2.34,
            version="1",
            silent={"worker.1"},
        )
    )
    for part in ("m at http://h:1/v1", "2.3 s", "pid 7", "unix:/r/worker.sock", "/r/NAME.log"):
        assert part in page
    assert "/r/worker.1.log" in page
    assert "worker.1.sock" not in page
