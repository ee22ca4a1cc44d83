import json
import re
from typing import Any

import jiter
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.schema import ArgumentTypes, escape, quote, to_json


def convert(text: str, schema: Any, **root: Any) -> str:
    types = ArgumentTypes({"type": "object", "properties": {"k": schema}, **root})
    return to_json(text, types.of("k"))


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "1", '"1"'),
        ({"type": "string"}, " a ", '" a "'),
        ({"type": "integer"}, " -7 ", "-7"),
        ({"type": "integer"}, "1_000", '"1_000"'),
        ({"type": "integer"}, "0x10", '"0x10"'),
        ({"type": "integer"}, "NaN", '"NaN"'),
        ({"type": "integer"}, "\uff19", '"\uff19"'),
        ({"type": "integer"}, " 2.0 ", "2.0"),
        ({"type": "integer"}, "1e3", "1e3"),
        ({"type": "integer"}, "2.5", "2.5"),
        ({"type": "number"}, "2.0", "2"),
        ({"type": "number"}, "1e3", "1000"),
        ({"type": ["integer", "number"]}, "2.0", "2"),
        ({"type": "integer"}, "1e300", "1e300"),
        ({"type": "integer"}, "1e400", '"1e400"'),
        ({"type": ["integer", "string"]}, "2.0", '"2.0"'),
        ({"type": ["integer", "string"]}, "1e3", '"1e3"'),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "number"}, "-0.0", "-0"),
        ({"type": "number"}, "0.1e1", "1"),
        ({"type": "number"}, "1e300", "1e300"),
        ({"type": "number"}, "1e-400", "1e-400"),
        ({"type": "number"}, "1e9999999", '"1e9999999"'),
        ({"type": "number"}, "12345678901234567890.5", "12345678901234567890.5"),
        ({"type": "number"}, "Infinity", '"Infinity"'),
        ({"type": "number"}, ".5", '".5"'),
        ({"type": "boolean"}, "TRUE", "true"),
        ({"type": "boolean"}, "0", "false"),
        ({"type": "null"}, "NULL", "null"),
        ({"type": "object"}, ' {"a": [1]} ', '{"a": [1]}'),
        ({"type": "object"}, '{"a": NaN}', '"{\\"a\\": NaN}"'),
        ({"type": "object"}, '{"a": 1e999}', '"{\\"a\\": 1e999}"'),
        ({"type": "array"}, "[1,2]", "[1,2]"),
        ({"type": "array"}, "[" * 100_000, '"' + "[" * 100_000 + '"'),
        ({"type": "array"}, "[" * 65 + "]" * 65, '"' + "[" * 65 + "]" * 65 + '"'),
        ({"type": "array"}, "[" * 64 + "]" * 64, "[" * 64 + "]" * 64),
        ({"type": "object"}, '{"a": "\\ud800"}', '"{\\"a\\": \\"\\\\ud800\\"}"'),
        ({"type": "object"}, '{"a": "\\ud83d\\ude00"}', '{"a": "\\ud83d\\ude00"}'),
        ({"type": "str"}, "1", '"1"'),
        ({"type": "int"}, "1", "1"),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"type": ["string", "boolean"]}, "true", "true"),
        ({"type": ["string", "boolean"]}, "[1]", '"[1]"'),
        ({"type": "weird"}, "1", '"1"'),
        ({"type": {}}, "1", '"1"'),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "3", "3"),
        ({"const": 3}, "3", "3"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["a", None]}, "null", "null"),
        ({"items": {"type": "integer"}}, "[1]", "[1]"),
        ({"properties": {}}, "{}", "{}"),
        ({}, "1", '"1"'),
        (True, "1", '"1"'),
        (None, "1", '"1"'),
    ],
)
def test_values_follow_their_declared_type(schema: Any, text: str, expected: str) -> None:
    assert convert(text, schema) == expected


@pytest.mark.parametrize("name", ["integer", "number"])
def test_long_integers_keep_their_digits_if_every_reader_can_hold_them(name: str) -> None:
    digits = "9" * 308
    assert convert(digits, {"type": name}) == digits
    assert convert(f"-{digits}", {"type": name}) == f"-{digits}"
    assert convert(f"[{digits}]", {"type": "array"}) == f"[{digits}]"


@pytest.mark.parametrize("number", ["9" * 309, "9" * 4300, "-" + "9" * 5000, "9" * 5000 + "e-4990"])
def test_a_number_that_some_reader_cannot_hold_stays_text(number: str) -> None:
    for name in ("integer", "number", "null", "boolean"):
        assert convert(number, {"type": name}) == f'"{number}"'
    for value in (f"[{number}]", f"[[1, {number}]]"):
        assert convert(value, {"type": "array"}) == f'"{value}"'
    assert convert(f'{{"a": {number}}}', {"type": "object"}) == quote(f'{{"a": {number}}}')


@given(
    st.from_regex(r"-?(0|[1-9][0-9]{0,10})(\.[0-9]{1,3})?(e[+-]?[0-9]{1,4})?", fullmatch=True),
    st.integers(0, 5000),
    st.sampled_from(["integer", "number", "array", "object"]),
)
def test_readers_of_clients_and_our_own_take_every_value(
    number: str, num_zeros: int, name: str
) -> None:
    number = re.sub(r"(?<=[1-9])", "0" * num_zeros, number, count=1)
    text = {"array": f"[{number}]", "object": f'{{"a": {number}}}'}.get(name, number)
    value = convert(text, {"type": name})
    json.loads(value)
    msgspec.json.decode(value)
    jiter.from_json(value.encode())


def test_local_references_are_followed_through_escapes_and_lists() -> None:
    defs = {"a/b": {"type": "integer"}, "list": [{"type": "boolean"}]}
    assert convert("5", {"$ref": "#/$defs/a~1b"}, **{"$defs": defs}) == "5"
    assert convert("1", {"$ref": "#/$defs/list/0"}, **{"$defs": defs}) == "true"
    assert convert("5", {"$ref": "https://example.org/x"}, **{"$defs": defs}) == '"5"'
    assert convert("5", {"$ref": "#/$defs/none"}, **{"$defs": defs}) == '"5"'


@pytest.mark.parametrize("part", ["9" * 5000, "²", "٣", "01", "-1", "1e0", "99999999999"])
def test_a_reference_to_no_element_of_a_list_declares_nothing(part: str) -> None:
    assert convert("5", {"$ref": f"#/$defs/{part}"}, **{"$defs": [{"type": "integer"}]}) == '"5"'


def test_schemas_that_refer_to_themselves_end() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    defs = {"A": loop, "B": loop}
    assert convert("5", {"$ref": "#/$defs/A"}, **{"$defs": defs}) == '"5"'


def test_properties_are_found_behind_references() -> None:
    schema = {"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"k": {"type": "integer"}}}}}
    assert ArgumentTypes(schema).of("k") == ("integer",)


@pytest.mark.parametrize("schema", [None, True, [], "x", {"properties": []}, {"allOf": 3}])
def test_an_unusual_schema_declares_nothing(schema: Any) -> None:
    assert ArgumentTypes(schema).of("k") is None


@given(st.text(), st.sampled_from(["integer", "number", "boolean", "object", "array", "null"]))
def test_any_text_becomes_strict_json(text: str, name: str) -> None:
    def refuse(token: str) -> None:
        raise AssertionError(token)

    json.loads(convert(text, {"type": name}), parse_constant=refuse)


@given(st.lists(st.text()))
def test_escaping_pieces_equals_escaping_the_whole(parts: list[str]) -> None:
    assert '"' + "".join(map(escape, parts)) + '"' == quote("".join(parts))
    assert json.loads(quote("".join(parts))) == "".join(parts)
