import pytest

from services.launcher.options.conflicts.replicas import REPLICAS
from tests.services.launcher.options.cases import Case, check_case, check_table

CASES = (
    Case(
        key="rank-size", meets="-dp 4 --data-parallel-rank 4", passes="-dp 4 --data-parallel-rank 3"
    ),
    Case(key="local-size", meets="-dp 2 -dpl 4", passes="-dp 4 -dpl 4"),
    Case(key="start-size", meets="-dp 4 -dpl 2 -dpr 3", passes="-dp 4 -dpl 2 -dpr 2"),
    Case(key="rank-local", meets="-dp 4 -dpn 0 -dpl 2", passes="-dp 4 -dpn 0 -dpl 1"),
    Case(key="rank-start", meets="-dp 4 -dpn 0 -dpr 0", passes="-dp 4 -dpl 2 -dpr 0"),
    Case(key="rank-hybrid", meets="-dp 4 -dpn 0 -dph", passes="-dp 4 -dpl 2 -dph"),
    Case(key="hybrid-external", meets="-dp 4 -dpl 2 -dph -dpe", passes="-dp 4 -dpe"),
    Case(key="hybrid-local", meets="-dp 4 -dph", passes="-dp 4 -dpl 2 -dph"),
    Case(key="hybrid-one", meets="-dp 4 -dpl 1 -dph", passes="-dp 4 -dpl 2 -dph"),
    Case(key="hybrid-all", meets="-dp 4 -dpl 4 -dph", passes="-dp 4 -dpl 2 -dph"),
    Case(
        key="headless-hybrid",
        meets="-dp 4 -dpl 2 --headless -dph",
        passes="-dp 4 -dpl 2 --headless",
    ),
    Case(
        key="headless-servers",
        meets="--headless --api-server-count 1",
        passes="--headless --api-server-count 0",
    ),
    Case(key="headless-empty", meets="-dp 2 --headless -dpl 0", passes="-dp 2 -dpl 0"),
    Case(key="headless-rank", meets="-dp 4 --headless -dpn 2", passes="-dp 4 --headless -dpr 2"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(REPLICAS, case)


def test_every_rule_has_its_case() -> None:
    check_table(REPLICAS, CASES)
