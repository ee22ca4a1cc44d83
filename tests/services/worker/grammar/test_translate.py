"""Whole constraints."""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.grammar.compiler import compile_anew
from services.worker.grammar.translate import is_triggered, translate
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import (
    MAX_CONSTRAINT_BYTES,
    CalledTool,
    CallRules,
    Constraint,
    FormatKind,
    TextFormat,
)
from shared.errors import RequestError
from shared.glm.tokenizer import GlmTokenizer
from tests.services.worker.grammar.conftest import NANO, Reader

NOW = CalledTool(name="now")


def test_a_format_beside_calls_leaves_the_choice(reader: Reader, call: Callable[..., str]) -> None:
    constraint = Constraint(
        format=TextFormat(kind=FormatKind.JSON_OBJECT), calls=CallRules(tools=(NOW,))
    )
    assert reader.reads(constraint, '{"a": 1}')
    assert reader.reads(constraint, call("now") + call("now"))
    assert not reader.begins(constraint, "{}" + call("now"))
    assert not is_triggered(constraint)


def test_calls_that_are_not_required_begin_behind_their_opening_tag(reader: Reader) -> None:
    constraint = Constraint(calls=CallRules(tools=(NOW,)))
    assert is_triggered(constraint)
    assert reader.reads(constraint, "now</tool_call>")
    assert not reader.begins(constraint, "<tool_call>")


def test_a_constraint_of_nothing_and_one_that_is_too_large_are_refused(reader: Reader) -> None:
    with pytest.raises(RequestError, match="neither a format nor calls"):
        reader.reads(Constraint(), "")
    large = TextFormat(kind=FormatKind.REGEX, text="a" * (MAX_CONSTRAINT_BYTES + 1))
    with pytest.raises(RequestError, match="more than"):
        reader.reads(Constraint(format=large), "")


NAMES = st.sampled_from(
    [
        *("type", "properties", "items", "anyOf", "$ref", "enum", "required", "pattern", "format"),
        *("begin", "end", "content", "tags", "triggers", "structures", "elements", "json_schema"),
    ]
)
WORDS = st.sampled_from(
    [
        "object",
        "string",
        "integer",
        "array",
        "tag",
        "sequence",
        "or",
        "any_text",
        "#",
        "<tool_call>",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
TEXT_KINDS = st.sampled_from(
    [FormatKind.JSON_SCHEMA, FormatKind.STRUCTURAL_TAG, FormatKind.REGEX, FormatKind.GRAMMAR]
)


@settings(max_examples=200, deadline=None)
@given(kind=TEXT_KINDS, value=VALUES, is_strict=st.booleans(), is_raw=st.booleans())
def test_whatever_is_described_it_has_a_grammar_or_a_reason(
    kind: FormatKind, value: Any, is_strict: bool, is_raw: bool
) -> None:
    text = value if is_raw and isinstance(value, str) else json.dumps(value)
    form = TextFormat(kind=kind, text=text, is_strict=is_strict)
    with contextlib.suppress(RequestError):
        compile_anew(Constraint(format=form), _vocabulary())


@settings(max_examples=150, deadline=None)
@given(value=VALUES, is_strict=st.booleans())
def test_whatever_a_tool_declares_it_has_a_grammar_or_a_reason(value: Any, is_strict: bool) -> None:
    tool = CalledTool(name="f", parameters_json=json.dumps(value), is_strict=is_strict)
    with contextlib.suppress(RequestError):
        compile_anew(Constraint(calls=CallRules(tools=(tool,), is_required=True)), _vocabulary())


@functools.cache
def _vocabulary() -> EngineVocabulary:
    return EngineVocabulary(GlmTokenizer.load(NANO))


def deep(depth: int) -> list[Constraint]:
    schema = '{"properties":{"x":' * depth + "{}" + "}}" * depth
    tool = CalledTool(name="f", parameters_json=schema)
    return [
        Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=schema)),
        Constraint(calls=CallRules(tools=(tool,), is_required=True)),
    ]


def test_a_schema_that_nests_deep_is_translated(vocabulary: EngineVocabulary) -> None:
    for constraint in deep(100):
        assert translate(constraint, vocabulary)


def test_a_schema_that_nests_too_deep_is_refused(vocabulary: EngineVocabulary) -> None:
    for constraint in deep(5000):
        with pytest.raises(RequestError, match="recursion"):
            translate(constraint, vocabulary)


def test_a_schema_that_is_too_deep_to_walk_through_is_refused(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(*_: object) -> None:
        raise RecursionError

    monkeypatch.setattr("services.worker.grammar.translate.add_format", exhaust)
    with pytest.raises(RequestError, match="nests too deep"):
        translate(deep(1)[0], vocabulary)
