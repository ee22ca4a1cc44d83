"""Values of arguments as their readers take them."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.constraint import CalledTool, Constraint
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader

Takes = Callable[..., set[str]]


@pytest.fixture
def takes(reader: Reader, make_calls: Callable[..., Constraint], call: Callable[..., str]) -> Takes:
    """Which of some texts a value may be."""

    def check(schema: Any, *texts: str, is_strict: bool = True, **root: Any) -> set[str]:
        parameters = {"properties": {"v": schema}, "required": ["v"], **root}
        tool = CalledTool(name="f", parameters_json=json.dumps(parameters), is_strict=is_strict)
        constraint = make_calls(tool)
        return {text for text in texts if reader.reads(constraint, call("f", v=text))}

    return check


@pytest.mark.parametrize("is_strict", [True, False])
def test_a_text_that_would_be_read_as_another_type_is_not_possible(
    takes: Takes, is_strict: bool
) -> None:
    texts = ("7", "3", "abc", "null", "7x", " 3 ")
    schema = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]}
    assert takes(schema, *texts, is_strict=is_strict) == {"7", "abc", "null", "7x"}


def test_a_text_or_null_keeps_what_is_said_of_the_text(takes: Takes) -> None:
    schema = {"type": ["string", "null"], "pattern": "^a+$"}
    assert takes(schema, "aa", "null", "b") == {"aa", "null"}
    schema = {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}
    assert takes(schema, "2024-02-29", "2023-02-29", "null", "today") == {"2024-02-29", "null"}


def test_listed_values_of_alternatives_are_the_only_ones(takes: Takes) -> None:
    schema = {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}, {"const": 4}]}
    assert takes(schema, "a", "c", '"a"', "null", "4", "5") == {"a", "null", "4"}


def test_a_listed_text_that_reads_as_a_number_is_not_written(takes: Takes) -> None:
    assert takes({"enum": ["1", "one", 2]}, "1", "one", "2") == {"one", "2"}
    with pytest.raises(RequestError, match="argument v: no value of it can be written"):
        takes({"type": ["string", "integer"], "enum": ["1"]}, "1")


def test_listed_values_of_another_type_than_declared_are_none(takes: Takes) -> None:
    schema = {"type": "integer", "enum": [1, "a", 2.0, 2.5, None, True]}
    assert takes(schema, "1", "a", "2.0", "2.5", "null", "true") == {"1", "2.0"}


def test_numbers_are_those_that_a_double_holds(takes: Takes) -> None:
    texts = ("1.5", "-2e10", "1e999", "007", "6.02e23")
    assert takes({"type": "number"}, *texts) == {"1.5", "-2e10", "6.02e23"}


def test_a_value_of_several_types_is_each_of_them_in_json(takes: Takes) -> None:
    schema = {"type": ["object", "array", "string"], "maxLength": 3, "maxItems": 1}
    found = takes(schema, "{}", "[1]", "[1, 2]", "abc", "abcd", "{x", '"abc"')
    assert found == {"{}", "[1]", "abc"}


def test_references_reach_the_definitions_and_the_whole(takes: Takes) -> None:
    schema = {"type": "array", "items": {"$ref": "#"}}
    text = '[{"v": [], "n": 1}]'
    more = {"$defs": {"n": {"type": "integer"}}}
    own = {"type": "object", "properties": {"v": schema, "n": {"$ref": "#/$defs/n"}}}
    parameters = {**own, **more, "required": ["v"], "additionalProperties": False}
    assert takes(schema, text, '[{"v": [], "n": "x"}]', **parameters) == {text}


def test_an_argument_without_a_value_is_left_out_and_refused_where_it_is_required(
    reader: Reader, make_calls: Callable[..., Constraint], call: Callable[..., str]
) -> None:
    def tool(**more: Any) -> CalledTool:
        schema = {"properties": {"a": {"type": "null"}, "v": False}, **more}
        return CalledTool(name="f", parameters_json=json.dumps(schema))

    assert reader.reads(make_calls(tool()), call("f", a="null"))
    assert not reader.begins(make_calls(tool()), call("f", v="x"))
    with pytest.raises(RequestError, match="argument v: no value"):
        reader.reads(make_calls(tool(required=["v"])), "")


def test_what_a_lax_schema_means_to_nobody_is_any_text(takes: Takes) -> None:
    schema = {"$ref": "#/$defs/nope"}
    assert takes(schema, "x", is_strict=False) == {"x"}
    with pytest.raises(RequestError, match="no value"):
        takes(schema, "x")


def test_types_that_nothing_else_said_leaves_a_value_of_are_not_written(takes: Takes) -> None:
    schema = {"allOf": [{"type": ["string", "integer"]}, {"enum": ["a", "b"]}]}
    assert takes(schema, "a", "1", "c") == {"a"}
