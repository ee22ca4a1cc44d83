"""docs/operators.md is what the code says."""

import re

from services.worker.ops.schemas import SCHEMAS
from tools import operators_page
from tools.operators_page import BEGIN, END, PAGE


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert operators_page.update(page) == page, "run `python -m tools.operators_page`"


def test_only_the_table_is_written() -> None:
    page = f"before\n{BEGIN}old\n{END}after\n"
    new = operators_page.update(page)
    assert new.startswith(f"before\n{BEGIN}| operator")
    assert new.endswith(f"|\n{END}after\n")
    assert "old" not in new


def test_every_operator_has_a_call_a_kernel_a_test_and_faults() -> None:
    rows = [line.strip("| ").split(" | ") for line in operators_page.render().splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == sorted(SCHEMAS)
    for name, called, takes, kernels, tests, faults in rows:
        assert re.match(r"`[\w/]+\.py` `[\w.]+`", called), name
        assert "`[" in takes, name
        # Operators that wait for other ranks have no compiled version.
        compiled = "" if "distribute" in name else r"(C: `\w+\.c` `\w+`<br>)+"
        assert re.fullmatch(rf"{compiled}torch: `\w+\.py` `\w+`", kernels), name
        assert tests.startswith("`test_"), name
        assert int(faults) >= 2, name


def test_the_page_names_files_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:tests|services|tools)/[\w/]+\.py)`", page):
        assert (operators_page.ROOT / path).exists(), path
