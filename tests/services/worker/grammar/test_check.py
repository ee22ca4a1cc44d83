"""Trying a constraint out."""

import json

import pytest

from services.worker.grammar import check as module
from services.worker.grammar.check import check
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.errors import RequestError


def test_usual_constraints_pass(vocabulary: EngineVocabulary) -> None:
    check(Constraint(format=TextFormat(kind=FormatKind.JSON_OBJECT)), vocabulary)
    tools = (CalledTool(name="now"), CalledTool(name="f", parameters_json='{"type":"object"}'))
    for is_required in (True, False):
        calls = CallRules(tools=tools, is_required=is_required)
        check(Constraint(calls=calls), vocabulary)


def test_one_that_exceeds_the_bounds_on_its_way_is_refused(vocabulary: EngineVocabulary) -> None:
    properties = {f"k{i}": {"type": "string"} for i in range(3000)}
    text = json.dumps({"type": "object", "properties": properties})
    wide = TextFormat(kind=FormatKind.JSON_SCHEMA, text=text)
    with pytest.raises(RequestError, match="items"):
        check(Constraint(format=wide), vocabulary)


def test_one_whose_tokens_take_too_long_is_refused(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_MEAN_MASK_MS", 0.0)
    with pytest.raises(RequestError, match="ms to decide"):
        check(Constraint(format=TextFormat(kind=FormatKind.REGEX, text="a+")), vocabulary)
