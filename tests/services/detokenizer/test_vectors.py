"""All vectors of tests/data/parser_cases.jsonl, streamed in every grouping."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.detokenizer.calls import CallRules
from services.detokenizer.machine import MachineRules, OutputMachine
from services.detokenizer.schema import ArgumentTypes
from shared.glm.dialect import Dialect
from tests.services.detokenizer.outputs import Shown, run

ROOT = Path(__file__).resolve().parents[3]
CASES = [
    json.loads(line)
    for line in (ROOT / "tests/data/parser_cases.jsonl").read_text("utf-8").splitlines()
]
# 0 is all at once; the long patterns cut at every kind of place.
GROUPINGS = [(1,), (0,), (2,), (3, 1), (5, 2, 7), (1, 1, 9), (4, 0)]
# What "ordinary_token_spelling" means in each case: these tags are text, the others are tokens.
SPELLED_OUT = {13: ["</think>"], 55: ["x</tool_call>y"], 56: ["<tool_call>"]}


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    return Dialect.load(ROOT / "models" / "glm-nano")


def tokens_of(case: dict[str, Any], dialect: Dialect) -> list[int]:
    text = case["output_text"]
    if not case["ordinary_token_spelling"]:
        return dialect.encode(text, allow_control=True)
    pattern = "(" + "|".join(map(re.escape, SPELLED_OUT[case["id"]])) + ")"
    pieces = re.split(pattern, text)
    return [
        token
        for i, piece in enumerate(pieces)
        for token in dialect.encode(piece, allow_control=i % 2 == 0)
    ]


def machine_of(case: dict[str, Any], dialect: Dialect) -> OutputMachine:
    tools = {
        tool["function"]["name"]: ArgumentTypes(tool["function"].get("parameters"))
        for tool in case["tools"] or []
    }
    choice = case["tool_choice"]
    allowed = frozenset(tools)
    if choice == "none":
        allowed = frozenset()
    elif isinstance(choice, dict):
        allowed = frozenset({choice["function"]["name"]})
    rules = MachineRules(
        calls=CallRules(tools=tools, allowed=allowed),
        starts_in_reasoning=case["prompt_ends_with"].endswith("<think>"),
    )
    return OutputMachine(dialect.vocabulary, rules, make_id=lambda: "call")


def as_expected(shown: Shown) -> dict[str, Any]:
    return {
        "reasoning": shown.reasoning or None,
        "content": shown.content or None,
        "tool_calls": [{"name": name, "arguments": text} for name, text in shown.named],
    }


@pytest.mark.parametrize("groups", GROUPINGS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']} {case['desc']}")
def test_the_vector_holds_in_every_grouping(
    case: dict[str, Any], groups: tuple[int, ...], dialect: Dialect
) -> None:
    made = machine_of(case, dialect)
    shown = run(made, tokens_of(case, dialect), groups=groups)
    assert as_expected(shown) == case["expected"]


def test_all_vectors_are_here() -> None:
    assert len(CASES) == 80
