"""Text formats."""

import json
from collections.abc import Callable

import pytest

from shared.constraint import Constraint, FormatKind
from shared.errors import FailureReason, RequestError
from tests.services.worker.grammar.conftest import Reader

Make = Callable[..., Constraint]


def test_a_json_object_is_any_object_and_nothing_else(reader: Reader, make_format: Make) -> None:
    constraint = make_format(FormatKind.JSON_OBJECT)
    assert reader.reads(constraint, '{"a": [1, {"b": null}], "é": "😀"}')
    assert not reader.begins(constraint, "[")
    assert not reader.begins(constraint, "Sure")


def test_blanks_between_the_parts_of_json_are_bounded_or_none(
    reader: Reader, make_format: Make
) -> None:
    text = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    usual = make_format(FormatKind.JSON_SCHEMA, text)
    assert reader.reads(usual, '{\n  "a": 1\n}')
    assert reader.reads(usual, '{"a":1}')
    for layout in ("\n\t", "\r\n  ", " ", "\n" + " " * 40):
        assert reader.reads(usual, "{" + layout + '"a":' + layout + "1}"), layout
    for layout in ("  ", "\n\n", "\n" + " " * 41, "\t", " \n"):
        assert not reader.begins(usual, "{" + layout), layout
    compact = make_format(FormatKind.JSON_SCHEMA, text, has_whitespace=False)
    assert reader.reads(compact, '{"a":1}')
    assert not reader.begins(compact, '{"a": ')
    own = make_format(FormatKind.JSON_SCHEMA, text, whitespace_pattern=" ")
    assert reader.reads(own, '{ "a": 1 }')
    assert not reader.begins(own, "{\n")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("time", "09:59:59Z", "09:59:60Z"),
        ("date", "2024-02-29", "2023-02-29"),
        ("ipv6", "::1", "::g"),
    ],
)
def test_formats_mean_in_json_what_they_mean_in_calls(
    reader: Reader, make_format: Make, name: str, good: str, bad: str
) -> None:
    text = json.dumps({"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"format": name}}})
    constraint = make_format(FormatKind.JSON_SCHEMA, text)
    assert reader.reads(constraint, f'["{good}"]')
    assert not reader.reads(constraint, f'["{bad}"]')


def test_a_strict_schema_refuses_what_a_lax_one_leaves_out(
    reader: Reader, make_format: Make
) -> None:
    text = '{"type":"array","items":{"type":"integer"},"uniqueItems":true}'
    assert reader.reads(make_format(FormatKind.JSON_SCHEMA, text), "[1, 1]")
    with pytest.raises(RequestError, match="uniqueItems"):
        reader.reads(make_format(FormatKind.JSON_SCHEMA, text, is_strict=True), "[]")


def test_options_of_the_engine_inside_a_schema_change_nothing(
    reader: Reader, make_format: Make
) -> None:
    text = '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}'
    with pytest.raises(RequestError, match="uniqueItems"):
        reader.reads(make_format(FormatKind.JSON_SCHEMA, text, is_strict=True), "[]")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nope", "not JSON"),
        ("[]", "a schema is a JSON object"),
        ("false", "allows no value"),
        ('{"type":"foo"}', "foo"),
        ('{"$ref":"http://example.com/x"}', "example.com"),
        ('{"$ref":"#"}', "no text fits"),
        ('{"type":"string","pattern":"(?=a)b"}', "look-ahead"),
        ('{"type":"integer","minimum":5,"maximum":3}', "minimum"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_the_reason(
    reader: Reader, make_format: Make, text: str, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        reader.reads(make_format(FormatKind.JSON_SCHEMA, text), "1")
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT
    assert caught.value.field == "constraint.format"


def test_true_is_any_value(reader: Reader, make_format: Make) -> None:
    assert reader.reads(make_format(FormatKind.JSON_SCHEMA, "true"), '"x"')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"[0-9]{3}-[a-z]+", "123-abc", "12-"),
        (r"^yes$", "yes", "no"),
        (r"a/b\d", "a/b7", "a/bx"),
        ("x\ny", "x\ny", "xy"),
    ],
)
def test_an_expression_matches_the_whole_text(
    reader: Reader, make_format: Make, pattern: str, good: str, bad: str
) -> None:
    constraint = make_format(FormatKind.REGEX, pattern)
    assert reader.reads(constraint, good)
    assert not reader.begins(constraint, bad)


@pytest.mark.parametrize("pattern", ["(", "(?=a)", r"(a)\1", ""])
def test_an_expression_that_is_none_is_refused(
    reader: Reader, make_format: Make, pattern: str
) -> None:
    with pytest.raises(RequestError):
        reader.reads(make_format(FormatKind.REGEX, pattern), "a")


def test_a_choice_is_one_of_its_texts(reader: Reader, make_format: Make) -> None:
    constraint = make_format(FormatKind.CHOICE, choices=("yes", "no", 'say "hi"\n', "no"))
    for text in ("yes", "no", 'say "hi"\n'):
        assert reader.reads(constraint, text)
    assert not reader.begins(constraint, "maybe")
    assert not reader.reads(constraint, "ye")


@pytest.mark.parametrize("choices", [(), ("a", ""), tuple(map(str, range(5000)))])
def test_a_choice_of_nothing_of_an_empty_text_or_of_too_many_is_refused(
    reader: Reader, make_format: Make, choices: tuple[str, ...]
) -> None:
    with pytest.raises(RequestError, match="choice"):
        reader.reads(make_format(FormatKind.CHOICE, choices=choices), "a")


@pytest.mark.parametrize(
    "text", ['start: "a" B\nB: /[0-9]+/', 'root ::= "a" digits\ndigits ::= [0-9]+']
)
def test_grammars_are_taken_in_both_notations(reader: Reader, make_format: Make, text: str) -> None:
    constraint = make_format(FormatKind.GRAMMAR, text)
    assert reader.reads(constraint, "a12")
    assert not reader.begins(constraint, "b")


@pytest.mark.parametrize("text", ["start: missing", "root ::= (((", "start: start", "", "%%"])
def test_a_grammar_that_is_none_is_refused(reader: Reader, make_format: Make, text: str) -> None:
    with pytest.raises(RequestError):
        reader.reads(make_format(FormatKind.GRAMMAR, text), "a")
