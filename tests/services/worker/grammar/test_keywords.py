"""Keywords of a schema with values that they cannot have."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.worker.grammar.compiler import compile_anew
from services.worker.grammar.keywords import check_keywords
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import CalledTool, Constraint, FormatKind
from shared.errors import RequestError

WRONG = {
    **{name: (5, [], {}, "a", None) for name in ("enum", "anyOf", "oneOf", "allOf")},
    **{name: (5, [], "a", None) for name in ("properties", "$defs", "patternProperties")},
    **{name: ("1", [], {}, None) for name in ("minimum", "exclusiveMaximum")},
    "multipleOf": (0, -1, "1", True),
    **{name: (-1, 1.5, "1", True, None) for name in ("minLength", "maxItems", "minProperties")},
    **{name: (5, [], {}, None) for name in ("pattern", "format", "$ref")},
    "required": (5, "a", [1], {}, True),
    "type": (5, [], [1], {}, None),
    **{name: (5, "a", None) for name in ("items", "additionalProperties", "not")},
    "prefixItems": (5, {}),
}
PLACES: list[Callable[[Any], Any]] = [
    lambda schema: schema,
    lambda schema: {"properties": {"x": schema}},
    lambda schema: {"items": {"anyOf": [{"type": "null"}, schema]}},
    lambda schema: {"$ref": "#/elsewhere/0", "elsewhere": [schema]},
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_a_keyword_cannot_have_is_refused_by_name_wherever_it_stands(
    name: str, place: Callable[[Any], Any]
) -> None:
    for value in WRONG[name]:
        with pytest.raises(RequestError) as caught:
            check_keywords(place({name: value}), "format")
        assert name in caught.value.message
        assert caught.value.field == "constraint.format"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"enum": [1], "const": None, "type": ["integer", "null"], "minimum": -1.5, "required": []},
        {"type": "int", "exclusiveMinimum": True, "minimum": 0},
        {"items": [{}, True], "properties": {"enum": {"type": "string"}, "required": True}},
        {"default": {"enum": 5}, "examples": [{"type": 5}], "const": {"minimum": "x"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "x"}]}}},
    ],
)
def test_what_is_usual_passes(schema: Any) -> None:
    check_keywords(schema, "format")


def test_an_error_stays_short_however_long_what_is_wrong() -> None:
    with pytest.raises(RequestError) as caught:
        check_keywords({"properties": {"x" * 9999: {"enum": "y" * 9999}}}, "format")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("wrong", [{"enum": 1}, {"type": "integer", "enum": 1}, {"enum": []}])
def test_forms_and_tools_refuse_the_same(
    vocabulary: EngineVocabulary,
    make_format: Callable[..., Constraint],
    make_calls: Callable[..., Constraint],
    wrong: dict[str, Any],
    *,
    is_strict: bool,
) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": wrong}, "required": ["a"]})
    tool = CalledTool(name="f", parameters_json=schema, is_strict=is_strict)
    form = make_format(FormatKind.JSON_SCHEMA, schema, is_strict=is_strict)
    for constraint in (make_calls(tool), form):
        with pytest.raises(RequestError, match=r"properties\.a\.enum must be an array"):
            compile_anew(constraint, vocabulary)
