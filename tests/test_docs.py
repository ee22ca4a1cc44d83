"""What the pages point at exists, and their lists are complete."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import CLAIMS
from services.launcher.__main__ import USAGE

ROOT = Path(__file__).resolve().parent.parent
ADRS = ROOT / "docs" / "adr"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


def test_decisions_have_numbers_of_their_own_and_are_all_listed() -> None:
    names = sorted(path.name for path in ADRS.glob("[0-9]*.md"))
    assert [name[:4] for name in names] == [f"{n:04}" for n in range(1, len(names) + 1)]
    listed = re.findall(r"^- \[(\d{4})\]\((.+?)\)", (ADRS / "README.md").read_text("utf-8"), re.M)
    assert listed == [(name[:4], name) for name in names]


def test_the_readme_lists_every_claim_that_is_measured() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme[readme.index("## Claims of speed") : readme.index("## Limits")]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(CLAIMS)


def test_every_claim_has_its_file() -> None:
    assert all((ROOT / "benchmarks" / f"{claim}.py").exists() for claim in CLAIMS)


@pytest.mark.parametrize("command", ["plan", "quantize", "up"])
def test_the_readme_shows_each_command_once_with_an_example(command: str) -> None:
    assert f"\n  {command} " in USAGE
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.search(rf"^```\nglm-mesh {command} ", readme, re.M)


def test_the_two_commands_that_matter_stand_alone() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "```\nmake run\n```" in readme
    assert "```\nmake test\n```" in readme
