"""Alternatives of texts."""

from typing import Any

import pytest

from services.worker.grammar.string_forms import Forms, StringForm, StringReader, is_read_as_other
from shared.errors import RequestError

ROOT = {
    "$defs": {
        "ab": {"enum": ["a", "b"]},
        "short": {"maxLength": 3},
        "me": {"$ref": "#/$defs/me"},
        "list": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}]},
    }
}
ANY = StringForm()


def read(schema: Any, *, is_strict: bool = True) -> Forms:
    return StringReader(ROOT, "calls: tool f", is_strict=is_strict).read(schema)


def literals(*texts: str) -> StringForm:
    return StringForm(literals=texts)


@pytest.mark.parametrize(
    ("schema", "forms"),
    [
        (True, [ANY]),
        ({}, [ANY]),
        (False, []),
        ({"type": "integer"}, []),
        ({"type": ["integer", "string"], "minimum": 3}, [ANY]),
        ({"enum": ["a", 1, "a", "b"]}, [literals("a", "b")]),
        ({"enum": [1, 2]}, []),
        ({"const": "a", "enum": ["b"]}, [literals("a")]),
        ({"$ref": "#/$defs/ab"}, [literals("a", "b")]),
        ({"$ref": "#/$defs/me"}, []),
        ({"$ref": "#/$defs/list"}, [ANY]),
        ({"$ref": "#/$defs/nope"}, []),
        (
            {"anyOf": [{"const": "x"}, {"type": "null"}, {"const": "y"}]},
            [literals("x"), literals("y")],
        ),
        ({"allOf": [{"$ref": "#/$defs/ab"}, {"enum": ["b", "c"]}]}, [literals("b")]),
        ({"allOf": [{"const": "a"}, {"const": "b"}]}, []),
        ({"type": "string", "anyOf": [{"const": "a"}, {"const": 1}]}, [literals("a")]),
    ],
)
def test_a_schema_is_multiplied_out(schema: Any, forms: Forms) -> None:
    assert read(schema) == forms


def test_conditions_of_all_parts_hold_together() -> None:
    (form,) = read(
        {"allOf": [{"$ref": "#/$defs/short"}, {"pattern": "^a"}, {"$ref": "#/$defs/ab"}]}
    )
    assert form.literals == ("a", "b")
    assert len(form.terminals) == 2


def test_a_lax_reader_keeps_values_and_leaves_patterns_and_bounds_out() -> None:
    assert read({"pattern": "(?=", "maxLength": "x", "not": {}}, is_strict=False) == [ANY]
    assert read({"enum": ["a"], "pattern": "^b"}, is_strict=False) == [literals("a")]


@pytest.mark.parametrize("keyword", ["not", "if", "contentEncoding"])
def test_what_no_expression_says_is_refused_when_strict(keyword: str) -> None:
    with pytest.raises(RequestError, match=f"tool f: {keyword} of a text cannot be enforced"):
        read({"type": "string", keyword: {}})


def test_too_many_alternatives_and_too_deep_ones_are_refused() -> None:
    many = {"anyOf": [{"minLength": i} for i in range(20)]}
    with pytest.raises(RequestError, match="too many alternatives"):
        read({"allOf": [many, {"anyOf": [{"maxLength": 50 + i} for i in range(20)]}]})
    deep: Any = {}
    for _ in range(40):
        deep = {"allOf": [deep]}
    with pytest.raises(RequestError, match="too deep"):
        read(deep)


@pytest.mark.parametrize(
    ("text", "types", "is_other"),
    [
        ("1", ("integer", "string"), True),
        (" 1\n", ("integer", "string"), True),
        ("1.5", ("integer", "string"), False),
        ("1.5e3", ("number", "string"), True),
        ("NULL", ("null", "string"), True),
        ("nullable", ("null", "string"), False),
        ("0", ("boolean", "string"), True),
        ("{x", ("object", "string"), True),
        ("[x\ny", ("array", "string"), True),
        ("1", ("string",), False),
        ("1", (), False),
    ],
)
def test_a_text_that_is_read_as_another_type_is_told_apart(
    text: str, types: tuple[str, ...], is_other: bool
) -> None:
    assert is_read_as_other(text, types) is is_other
