"""What a tool's schema says about its arguments."""

import json
from typing import Any

import pytest

from services.worker.grammar.arguments import Arguments, read_arguments
from shared.constraint import CalledTool
from shared.errors import RequestError


def read(schema: Any, *, is_strict: bool = False) -> Arguments:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return read_arguments(CalledTool(name="f", parameters_json=text, is_strict=is_strict))


def test_arguments_come_in_the_order_of_the_schema_with_what_is_required() -> None:
    found = read({"properties": {"b": {}, "a": {"type": "integer"}}, "required": ["a"]})
    assert [(a.name, a.is_required, a.is_text) for a in found.declared] == [
        ("b", False, True),
        ("a", True, False),
    ]
    assert not found.takes_any


def test_a_tool_without_parameters_takes_none_and_an_open_object_takes_any() -> None:
    assert read("") == Arguments()
    assert read({"type": "object"}).takes_any
    assert not read({"type": "object", "additionalProperties": False}).takes_any
    assert not read({"type": "object"}, is_strict=True).takes_any


@pytest.mark.parametrize(
    ("schema", "is_text"),
    [
        ({"type": "string"}, True),
        ({}, True),
        (True, True),
        ({"type": ["string", "null"]}, True),
        ({"type": "unheard of"}, True),
        ({"type": "integer"}, False),
        ({"type": ["integer", "null"]}, False),
        ({"properties": {"x": {}}}, False),
        ({"items": {}}, False),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, True),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
        ({"$ref": "#/$defs/n"}, False),
        ({"$ref": "#/$defs/s"}, True),
        ({"$ref": "#/$defs/me"}, True),
    ],
)
def test_a_value_is_raw_text_where_a_string_is_among_its_types(schema: Any, is_text: bool) -> None:
    definitions = {
        "n": {"type": "number"},
        "s": {"type": "string"},
        "me": {"$ref": "#/$defs/me"},
    }
    found = read({"properties": {"x": schema}, "$defs": definitions})
    assert found.declared[0].is_text is is_text
    assert found.definitions == {"$defs": definitions}


def test_listed_values_are_the_only_ones() -> None:
    found = read({"properties": {"e": {"enum": ["a", 1]}, "c": {"const": None}}})
    assert [a.literals for a in found.declared] == [("a", 1), (None,)]


def test_properties_behind_references_and_all_of_count() -> None:
    schema = {
        "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {}}, "required": ["y"]}],
        "$defs": {"a": {"properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    names = {a.name: a.is_required for a in read(schema).declared}
    assert names == {"y": True, "x": True}


def test_a_branch_makes_nothing_required_and_is_refused_when_strict() -> None:
    schema = {"anyOf": [{"properties": {"x": {}}, "required": ["x"]}, {"properties": {"y": {}}}]}
    assert {a.name: a.is_required for a in read(schema).declared} == {"x": False, "y": False}
    with pytest.raises(RequestError, match="no anyOf or oneOf at their top"):
        read(schema, is_strict=True)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("{", "not JSON"),
        ([], "of an object"),
        ({"properties": 3}, "properties must be an object"),
        ({"properties": {"x": 3}}, "argument x must be an object"),
    ],
)
def test_parameters_that_are_no_schema_are_refused_with_the_tool(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"tool f.*{reason}"):
        read(schema)


def test_a_required_argument_that_is_not_declared_is_refused_when_strict() -> None:
    schema = {"properties": {"x": {}}, "required": ["y"]}
    assert len(read(schema).declared) == 1
    with pytest.raises(RequestError, match="y is required and not declared"):
        read(schema, is_strict=True)
