"""Types of arguments."""

from typing import Any

import pytest

from shared.argument_types import declared_properties, declared_types, type_of

ROOT: dict[str, Any] = {
    "properties": {"a": {"type": "integer"}},
    "anyOf": [{"properties": {"a": {}, "b": True}}, {"$ref": "#/$defs/more"}],
    "$defs": {
        "more": {"properties": {"c": {"const": None}}},
        "me": {"anyOf": [{"$ref": "#/$defs/me"}, {"type": "null"}]},
    },
}


def test_properties_are_found_behind_every_branch_and_the_first_of_a_name_counts() -> None:
    assert declared_properties(ROOT) == {"a": {"type": "integer"}, "b": True, "c": {"const": None}}
    assert declared_properties([1]) == {}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": ["string", "null", "integer"]}, ("null", "integer", "string")),
        ({"type": "int"}, ("integer",)),
        ({"type": "unheard of"}, ("string",)),
        ({"enum": ["a", 1.5, {}, []]}, ("number", "object", "array", "string")),
        ({"type": "string", "enum": [1]}, ("string",)),
        ({"const": False}, ("boolean",)),
        ({"$ref": "#/$defs/me"}, ("null",)),
        ({"$ref": "#/nowhere"}, ()),
        ({"properties": {}}, ("object",)),
        ({"items": {}, "anyOf": [{"type": "null"}]}, ("null",)),
        ({}, ()),
        (True, ()),
    ],
)
def test_types_come_in_the_order_in_which_they_are_tried(schema: Any, types: Any) -> None:
    assert declared_types(schema, ROOT) == types


def test_a_truth_value_is_no_integer() -> None:
    assert [type_of(v) for v in (True, 1, 1.0, None, "", {}, [])] == [
        *("boolean", "integer", "number", "null", "string", "object", "array")
    ]
