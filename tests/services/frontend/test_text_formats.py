"""The form of the text, in each of the ways that clients know."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.errors import ApiError
from services.frontend.schemas.chat import ChatRequest
from services.frontend.text_formats import text_format_of
from services.frontend.validation import parse
from shared.constraint import MAX_CONSTRAINT_BYTES, FormatKind, TextFormat

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def read(**fields: Any) -> tuple[TextFormat | None, str]:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    return text_format_of(parse(ChatRequest, body))


def json_schema(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **inner}}


def test_any_text_is_no_form() -> None:
    assert read() == (None, "")
    assert read(response_format={"type": "text"}) == (None, "")
    assert read(response_format=None, structured_outputs=None) == (None, "")


def test_response_formats_of_openai() -> None:
    form, param = read(response_format={"type": "json_object"})
    assert (form, param) == (TextFormat(kind=FormatKind.JSON_OBJECT), "response_format")
    form, _ = read(response_format=json_schema())
    assert form is not None
    assert (form.kind, form.is_strict) == (FormatKind.JSON_SCHEMA, False)
    assert json.loads(form.text) == SCHEMA
    assert "é" in form.text
    form, _ = read(response_format=json_schema(strict=True, description="x"))
    assert form is not None
    assert form.is_strict


def test_a_structural_tag_is_passed_on_as_it_is() -> None:
    form, _ = read(response_format=TAG)
    assert form is not None
    assert (form.kind, json.loads(form.text)) == (FormatKind.STRUCTURAL_TAG, TAG)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": SCHEMA}, (FormatKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False), ())),
        ({"json": '{"type": "null"}'}, (FormatKind.JSON_SCHEMA, '{"type": "null"}', ())),
        ({"json": True}, (FormatKind.JSON_SCHEMA, "true", ())),
        ({"regex": "a+"}, (FormatKind.REGEX, "a+", ())),
        ({"choice": ["a", "b"]}, (FormatKind.CHOICE, "", ("a", "b"))),
        ({"grammar": "start: x"}, (FormatKind.GRAMMAR, "start: x", ())),
        ({"json_object": True, "regex": None}, (FormatKind.JSON_OBJECT, "", ())),
        ({"structural_tag": json.dumps(TAG)}, (FormatKind.STRUCTURAL_TAG, json.dumps(TAG), ())),
    ],
)
def test_structured_outputs_of_vllm(given: Any, expected: Any) -> None:
    form, param = read(structured_outputs=given)
    assert form is not None
    assert (form.kind, form.text, form.choices) == expected
    assert param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, FormatKind.JSON_SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, FormatKind.JSON_SCHEMA),
        ({"guided_regex": "a"}, FormatKind.REGEX),
        ({"guided_choice": ["a"]}, FormatKind.CHOICE),
        ({"guided_grammar": "start: x"}, FormatKind.GRAMMAR),
    ],
)
def test_the_older_names(fields: Any, expected: FormatKind) -> None:
    form, param = read(**fields)
    assert form is not None
    assert form.kind is expected
    assert param == next(iter(fields))


def test_spacing_and_closed_objects() -> None:
    form, _ = read(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert form is not None
    assert not form.has_whitespace
    form, _ = read(structured_outputs={"json": SCHEMA, "whitespace_pattern": " ?"})
    assert form is not None
    assert form.whitespace_pattern == " ?"
    form, _ = read(guided_json=SCHEMA, guided_whitespace_pattern=" ")
    assert form is not None
    assert form.whitespace_pattern == " "
    nested = {"items": {"properties": {}}, "properties": {}, "additionalProperties": True}
    form, _ = read(structured_outputs={"json": nested, "disable_additional_properties": True})
    assert form is not None
    closed = json.loads(form.text)
    assert closed["additionalProperties"] is True, "what is said stays"
    assert closed["items"]["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"response_format": {}}, "response_format.type", "Missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
        ({"response_format": {"type": 3}}, "response_format.type", "Supported values"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Missing",
        ),
        (
            {"response_format": json_schema(schema=[])},
            "response_format.json_schema.schema",
            "expected a JSON Schema",
        ),
        (
            {"response_format": json_schema(strict="yes")},
            "response_format.json_schema.strict",
            "expected a boolean",
        ),
        (
            {"response_format": json_schema(name=3)},
            "response_format.json_schema.name",
            "expected a string",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "got none"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "'regex' and 'choice'",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty array"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "empty"),
        ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs.choice", "4096"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json", "JSON Schema"),
        (
            {"structured_outputs": {"structural_tag": "[]"}},
            "structured_outputs.structural_tag",
            "expected an object",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
            "structured_outputs.disable_additional_properties",
            "only allowed with",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "only allowed with"),
        ({"guided_choice": [3]}, "guided_choice[0]", "expected a string"),
        (
            {"response_format": {"type": "json_object"}, "guided_regex": "a"},
            "guided_regex",
            "exclude each other",
        ),
    ],
)
def test_what_is_no_form_is_refused_where_it_is_wrong(fields: Any, param: str, text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_schemas_are_bounded_in_depth_and_size() -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="nests deeper"):
        read(response_format=json_schema(schema=deep))
    with pytest.raises(ApiError, match="more than"):
        read(structured_outputs={"regex": "a" * (MAX_CONSTRAINT_BYTES + 1)})


NAMES = st.sampled_from(
    ["type", "json_schema", "schema", "name", "strict", "json", "regex", "choice", "format"]
)
FIELDS = st.sampled_from(
    ["response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=150, deadline=None)
@given(given_fields=st.dictionaries(FIELDS, JSON_VALUES, min_size=1, max_size=2))
def test_whatever_is_sent_it_is_a_form_or_a_400(given_fields: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        form, param = read(**given_fields)
        assert (form is None) == (not param)
