from pathlib import Path

from services.launcher.log_tail import MAX_LINES_PER_LOOK, LogTail


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def test_last_lines_go_back_to_the_last_start_only(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = LogTail(path)
    append(path, "old\n")
    tail.mark()
    assert tail.last_lines(5) == []
    append(path, "".join(f"{n}\n" for n in range(10)))
    assert tail.last_lines(3) == ["7", "8", "9"]


def test_warnings_and_errors_come_once_with_their_tracebacks(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = LogTail(path)
    append(path, "t INFO s m: quiet\n    quiet too\nt ERROR s m: loud\n    File x\nt WARNING s")
    assert tail.new_loud_lines() == ["t ERROR s m: loud", "    File x"]
    append(path, " m: é\nt INFO s m: done\n")
    assert tail.new_loud_lines() == ["t WARNING s m: é"]
    assert tail.new_loud_lines() == []


def test_a_flood_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = LogTail(path)
    append(path, "t ERROR s m: again\n" * 1000)
    lines = tail.new_loud_lines()
    assert len(lines) == MAX_LINES_PER_LOOK + 1
    assert "980 more lines" in lines[-1]


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    tail = LogTail(tmp_path / "none.log")
    assert tail.last_lines(3) == tail.new_loud_lines() == []


def test_a_log_at_its_limit_is_set_aside_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    tail = LogTail(path)
    with path.open("a", encoding="utf-8") as service:  # as a service has it: open, appending
        for turn in ("first", "second", "third"):
            service.write(f"t ERROR s m: {turn}\n" + "t INFO s m: filler\n" * 10)
            service.flush()
            tail.rotate(limit=10_000)
            assert path.stat().st_size > 100
            assert tail.new_loud_lines() == [f"t ERROR s m: {turn}"]
            tail.rotate(limit=100)
            assert path.stat().st_size == 0
            assert turn in (tmp_path / "x.log.1").read_text(encoding="utf-8")
        service.write("t ERROR s m: last\n")
    assert tail.new_loud_lines() == tail.last_lines(3) == ["t ERROR s m: last"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.log", "x.log.1"]


def test_a_log_that_is_not_there_yet_is_left_alone(tmp_path: Path) -> None:
    LogTail(tmp_path / "x.log").rotate(limit=1)
    assert not list(tmp_path.iterdir())
