"""docs/options.md is what the tables say."""

import re

from services.launcher.options.conflicts.table import CONFLICTS
from services.launcher.options.serve import ServeOptions
from services.launcher.settings import UpSettings
from shared.config import flag_of
from tools import options_page
from tools.options_page import BEGIN, END, PAGE


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert options_page.update(page) == page, "run `python -m tools.options_page`"


def test_only_the_tables_are_written() -> None:
    new = options_page.update(f"before\n{BEGIN}| stale row |\n{END}after\n")
    assert new.startswith(f"before\n{BEGIN}## Settings")
    assert new.endswith(f"|\n{END}after\n")
    assert "stale row" not in new


def test_every_flag_has_a_row_and_says_what_it_does() -> None:
    table = options_page.render()
    for name in [*ServeOptions.model_fields, *UpSettings.model_fields]:
        row = re.search(rf"^\| `{flag_of(name)}`[^|]*\| ([^|]+) \|", table, re.M)
        assert row is not None, name
        assert row[1].strip(), name


def test_rows_lead_to_conflicts_and_back() -> None:
    table = options_page.render()
    anchors = set(re.findall(r'<a id="([\w-]+)">', table))
    assert anchors == {rule.key for rule in CONFLICTS}
    assert set(re.findall(r"\(#([\w-]+)\)", table)) <= anchors
    assert "[dcp-not-tp](#dcp-not-tp)" in table


def test_every_row_has_all_its_cells() -> None:
    rows = [line for line in options_page.render().splitlines() if line.startswith("|")]
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in {5, 6}, row
