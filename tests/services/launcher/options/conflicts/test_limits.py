import pytest

from services.launcher.options.conflicts.limits import LIMITS
from tests.services.launcher.options.cases import (
    GLM,
    W8A8,
    Case,
    check_case,
    check_table,
    drafts,
    join,
)

CASES = (
    Case(
        key="tokens-seqs",
        meets="--max-num-batched-tokens 192 --max-num-seqs 256",
        passes="--max-num-batched-tokens 256 --max-num-seqs 256",
    ),
    Case(
        key="tokens-drafts",
        meets=join("--max-num-batched-tokens 191 --max-num-seqs 32", drafts(5)),
        passes=join("--max-num-batched-tokens 192 --max-num-seqs 32", drafts(5)),
    ),
    Case(
        key="tokens-length",
        meets="--no-enable-chunked-prefill --max-num-batched-tokens 2k --max-model-len 4k",
        passes="--max-num-batched-tokens 2k --max-model-len 4k",
    ),
    Case(key="length-model", meets="--max-model-len 2M", passes="--max-model-len 1M"),
    Case(
        key="quantization-missing",
        meets="--quantization ascend",
        passes="-q ascend",
        passing_model=W8A8,
    ),
    Case(
        key="quantization-none",
        meets="--quantization none",
        passes="--quantization none",
        model=W8A8,
        passing_model=GLM,
    ),
    Case(
        key="tools-parser",
        meets="--enable-auto-tool-choice --tool-call-parser none",
        passes="--tool-call-parser none",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(LIMITS, case)


def test_every_rule_has_its_case() -> None:
    check_table(LIMITS, CASES)
