"""Parts of schemas that stand for themselves."""

from typing import Any

import jsonschema_rs
import pytest

from services.worker.grammar.schema_parts import standing_alone

ROOT: dict[str, Any] = {
    "properties": {"leaf": {"type": "integer"}, "kids": {"items": {"$ref": "#"}}},
    "$defs": {
        "word": {"type": "string", "title": "a word"},
        "chain": {"anyOf": [{"$ref": "#/$defs/word"}, {"$ref": "#/properties/leaf"}]},
        "loop": {"items": {"$ref": "#/$defs/loop"}, "type": "array"},
    },
}


def alone(schema: Any) -> dict[str, Any]:
    return standing_alone(schema, ROOT, "calls: f")


def test_what_refers_to_nothing_takes_nothing_with_it() -> None:
    assert alone({"type": "integer", "minimum": 3}) == {"type": "integer", "minimum": 3}


def test_everything_that_is_referred_to_comes_along_and_nothing_else() -> None:
    found = alone({"items": {"$ref": "#/$defs/chain"}})
    assert found == {
        "items": {"$ref": "#/$defs/d0"},
        "$defs": {
            "d0": {"anyOf": [{"$ref": "#/$defs/d1"}, {"$ref": "#/$defs/d2"}]},
            "d1": {"type": "string"},
            "d2": {"type": "integer"},
        },
    }


def test_references_in_circles_are_taken_once() -> None:
    assert alone({"$ref": "#/$defs/loop"}) == {
        "$ref": "#/$defs/d0",
        "$defs": {"d0": {"items": {"$ref": "#/$defs/d0"}, "type": "array"}},
    }


def test_a_reference_to_the_whole_means_the_whole_it_came_from() -> None:
    found = alone({"type": "array", "items": {"$ref": "#"}})
    assert found["items"] == {"$ref": "#/$defs/d0"}
    assert jsonschema_rs.is_valid(found, [{"leaf": 1, "kids": [{"leaf": 2}]}])
    assert not jsonschema_rs.is_valid(found, [{"leaf": 1, "kids": [{"leaf": "x"}]}])


def test_a_reference_that_leads_nowhere_is_left_for_the_engine_to_refuse() -> None:
    for pointer in ("#/$defs/nope", "https://example.com/schema", 3):
        assert alone({"$ref": pointer}) == {"$ref": pointer}


def test_properties_and_values_named_like_keywords_are_kept() -> None:
    schema = {
        "properties": {"title": {"type": "string"}, "$ref": {"const": {"$ref": "#/x"}}},
        "default": {},
        "description": "gone",
    }
    assert alone(schema) == {
        "properties": {"title": {"type": "string"}, "$ref": {"const": {"$ref": "#/x"}}}
    }


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "date"}, "2024-02-29", "2023-02-29"),
        (
            {"type": ["string", "null"], "format": "date", "pattern": "^2"},
            "2024-01-01",
            "1999-01-01",
        ),
        ({"type": ["string", "null"], "format": "date", "pattern": "^2"}, None, "2"),
        ({"type": "string", "format": "unheard-of"}, "x", 1),
    ],
)
def test_a_format_is_enforced_by_our_own_expression(schema: Any, good: Any, bad: Any) -> None:
    found = alone(schema)
    assert jsonschema_rs.is_valid(found, good)
    assert not jsonschema_rs.is_valid(found, bad)
