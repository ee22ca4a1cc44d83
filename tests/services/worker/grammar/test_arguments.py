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
    assert [(a.name, a.is_required, a.types) for a in found.declared] == [
        ("b", False, ()),
        ("a", True, ("integer",)),
    ]
    assert not found.takes_any


def test_a_tool_without_parameters_takes_none_and_an_open_object_takes_any() -> None:
    assert read("") == Arguments()
    assert read({"type": "object"}).takes_any
    assert not read({"type": "object", "additionalProperties": False}).takes_any
    assert not read({"type": "object"}, is_strict=True).takes_any


@pytest.mark.parametrize(
    ("others", "takes_any"),
    [
        (True, True),
        (False, False),
        ({}, True),
        ({"type": "string"}, True),
        ({"type": "null"}, False),
    ],
)
def test_arguments_that_are_not_declared_are_texts_or_none(others: Any, takes_any: bool) -> None:
    """Whoever reads the call knows no type of them."""
    assert read({"additionalProperties": others}).takes_any is takes_any


def test_an_argument_is_of_the_types_that_its_reader_finds() -> None:
    root = {
        "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"anyOf": [{"const": 1}, {}]}},
        "$defs": {"n": {"type": ["string", "null"]}},
    }
    found = read(root)
    assert [a.types for a in found.declared] == [("null", "string"), ("integer",)]
    assert found.root == root


def test_an_argument_that_is_declared_twice_follows_both() -> None:
    found = read(
        {"properties": {"x": {"minimum": 1}}, "allOf": [{"properties": {"x": {"maximum": 2}}}]}
    )
    assert found.declared[0].schema == {"allOf": [{"minimum": 1}, {"maximum": 2}]}


@pytest.mark.parametrize("name", ["", " a", "a\n"])
def test_a_name_that_readers_would_trim_is_left_out_and_refused_when_strict(name: str) -> None:
    assert read({"properties": {name: {}}}).declared == ()
    with pytest.raises(RequestError, match="blanks around it"):
        read({"properties": {name: {}}}, is_strict=True)


@pytest.mark.parametrize(
    ("keyword", "value"), [("not", {}), ("if", {}), ("minProperties", 1), ("dependentRequired", {})]
)
def test_what_holds_for_the_arguments_as_a_whole_is_refused_when_strict(
    keyword: str, value: Any
) -> None:
    schema = {"properties": {"x": {}}, keyword: value}
    assert len(read(schema).declared) == 1
    with pytest.raises(RequestError, match=f"{keyword} of strict parameters"):
        read(schema, is_strict=True)


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
        ({"properties": {"x": 3}}, "properties.x must be a schema"),
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
