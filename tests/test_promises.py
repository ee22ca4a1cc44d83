"""The page of promises is complete, and every test that it names exists and runs."""

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "promises.md"
# Lines of each room; a promise may be added and never be lost.
LEAST = {"Frontend": 57, "Detokenizer": 6, "Scheduler": 14, "Worker": 30, "Mesh": 21}
_ROW = re.compile(r"\| \[(.+?)\]\((https://github\.com/\S+?)\) \| (.+?) \| (.*) \|\Z")
_HEAD = ("| situation | promise | tests |", "|---|---|---|")
_NOT_RUN = ("skip", "skipif", "xfail", "soak")


@dataclass(frozen=True)
class Line:
    """One row of a table."""

    room: str
    situation: str
    promise: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.room}: {self.situation[:60]}"


def lines_of(text: str) -> list[Line]:
    """The rows of all tables; a row of another form is an error."""
    room, found = "", []
    for row in text.splitlines():
        if row.startswith("## "):
            room = row.removeprefix("## ")
        elif row.startswith("|") and row not in _HEAD:
            match = _ROW.match(row)
            assert match is not None, f"no line of three cells: {row[:80]}"
            tests = tuple(re.findall(r"`(\S+?)`", match[4]))
            found.append(Line(room, match[1], match[3], tests))
    return found


LINES = lines_of(PAGE.read_text("utf-8"))


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


def function_at(node_id: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The test that a node id names, None if there is none that is run."""
    path, *names = node_id.split("::")
    if not (ROOT / path).is_file():
        return None
    body: list[ast.stmt] = tree_of(path).body
    for name in names:
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next((n for n in body if isinstance(n, kinds) and n.name == name), None)
        if node is None or any(marks_as_not_run(mark) for mark in node.decorator_list):
            return None
        if not isinstance(node, ast.ClassDef):
            return node
        body = node.body
    return None


def marks_as_not_run(decorator: ast.expr) -> bool:
    text = ast.unparse(decorator)
    return any(re.match(rf"pytest\.mark\.{name}\b", text) for name in _NOT_RUN)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_every_promise_names_tests_that_exist_and_run(line: Line) -> None:
    assert line.promise.strip().endswith(".")
    assert line.tests
    missing = [node_id for node_id in line.tests if function_at(node_id) is None]
    assert not missing


def test_no_line_is_lost() -> None:
    counts = {room: sum(line.room == room for line in LINES) for room in LEAST}
    assert all(counts[room] >= least for room, least in LEAST.items()), counts
    assert sum(counts.values()) == len(LINES)


def test_no_situation_stands_twice_in_a_room() -> None:
    pairs = [(line.room, line.situation) for line in LINES]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("node_id", "is_there"),
    [
        ("tests/test_promises.py::test_no_line_is_lost", True),
        ("tests/test_promises.py::test_that_nobody_wrote", False),
        ("tests/test_promises.py::LINES", False),
        ("tests/test_promises.py::Line", False),
        ("tests/no_such_file.py::test_x", False),
        ("tests/services/frontend/test_serving.py::TestFull", False),
    ],
)
def test_a_name_alone_is_no_test(node_id: str, is_there: bool) -> None:
    assert (function_at(node_id) is not None) is is_there


def test_a_row_with_an_empty_cell_is_seen() -> None:
    with pytest.raises(AssertionError, match="three cells"):
        lines_of("## Frontend\n| [a](https://github.com/b) |  | `c::d` |")
