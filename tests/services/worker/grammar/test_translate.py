"""Whole constraints."""

from collections.abc import Callable

import pytest

from services.worker.grammar.translate import is_triggered
from shared.constraint import (
    MAX_CONSTRAINT_BYTES,
    CalledTool,
    CallRules,
    Constraint,
    FormatKind,
    TextFormat,
)
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader

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
