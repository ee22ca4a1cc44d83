"""Grammars as text."""

import json

import pytest

from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.grammar.writer import GrammarWriter, quoted, refused, regex_terminal, token


@pytest.fixture
def writer(vocabulary: EngineVocabulary) -> GrammarWriter:
    return GrammarWriter(vocabulary)


def test_equal_parts_are_written_once(writer: GrammarWriter) -> None:
    assert writer.rule('"a"') == writer.rule('"a"') != writer.rule('"b"')
    assert writer.schema({"type": "null"}) == writer.schema({"type": "null"})
    grammars = json.loads(writer.finish("r1"))["grammars"]
    assert [g["name"] for g in grammars] == ["main", "g3"]
    assert grammars[0]["lark_grammar"].splitlines() == ["start: r1", 'r1: "a"', 'r2: "b"']


def test_what_a_client_wrote_never_becomes_a_rule_of_ours(
    writer: GrammarWriter, vocabulary: EngineVocabulary
) -> None:
    evil = 'x"\nstart: "evil'
    grammar = writer.finish(writer.rule(writer.literal(evil)))
    matcher = vocabulary.matcher(grammar)
    assert not matcher.is_error()
    assert matcher.compute_ff_bytes() == evil.encode()


def test_a_literal_has_the_control_tokens_that_it_spells(
    writer: GrammarWriter, vocabulary: EngineVocabulary
) -> None:
    control = vocabulary.control
    assert writer.literal("<tool_call>f") == f'{token(control.tool_call)} "f"'
    assert writer.literal("") == '""'


def test_expressions_are_escaped_for_their_place() -> None:
    assert regex_terminal("a/b") == r"/a\/b/"
    assert regex_terminal(r"\d") == "/[0-9]/"
    assert quoted('a"\n') == r'"a\"\n"'


def test_a_refusal_names_its_part() -> None:
    error = refused("format", "no")
    assert (error.field, error.message) == ("constraint.format", "format: no")
