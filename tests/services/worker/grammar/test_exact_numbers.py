"""Numbers of schemas: what is written fits, or the schema is refused."""

import itertools
import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from services.worker.grammar.compiler import compile_anew
from services.worker.grammar.exact_numbers import exact_numbers
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import CalledTool, Constraint, FormatKind, TextFormat
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader

PLACES: list[Callable[[Any], Any]] = [
    lambda schema: schema,
    lambda schema: {"type": "array", "prefixItems": [schema]},
    lambda schema: {"type": "object", "properties": {"a": schema}},
    lambda schema: {"$ref": "#/$defs/d", "$defs": {"d": schema}},
]
LISTED = [1234567890123456789, 2**53 + 1, -(2**53) - 1, 10**50, 123456789.12345679]
# Every digit counts: one more or less is another side of some bound.
ENDS = [*("0", "0.000001", "0.3", "0.9", "1", "24", "123456789.123456789"), "9007199254740993"]
BESIDE = [Decimal(0), Decimal("1e-18"), Decimal("1e-9"), Decimal("0.01"), Decimal(1)]


def form(schema: Any) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=text))


@pytest.mark.parametrize("value", LISTED)
@pytest.mark.parametrize("place", PLACES)
def test_a_listed_number_that_cannot_be_kept_is_refused_with_the_bound(
    vocabulary: EngineVocabulary,
    make_calls: Callable[..., Constraint],
    place: Callable[[Any], Any],
    value: float,
) -> None:
    for listed in ({"const": value}, {"enum": [1, value]}, {"enum": [{"b": [value]}]}):
        with pytest.raises(RequestError, match=r"cannot be kept.*2\^53") as caught:
            compile_anew(form(place(listed)), vocabulary)
        assert len(caught.value.message) < 200
    inner = place({"type": ["integer", "number"], "enum": [1, value]})
    text = json.dumps({"type": "object", "properties": {"x": {"type": "array", "items": inner}}})
    tool = CalledTool(name="f", parameters_json=text.replace("#/", "#/properties/x/items/"))
    with pytest.raises(RequestError, match=r"f, argument x: .* cannot be kept"):
        compile_anew(make_calls(tool), vocabulary)


@pytest.mark.parametrize("value", [0, 7, 2**53, -(2**53), 2**62, 0.1, 2.5, 1e-7, 1e20, 0.3])
def test_a_number_that_can_be_kept_is_written_as_it_is(reader: Reader, value: float) -> None:
    assert reader.reads(form({"const": value}), format(Decimal(repr(value)), "f"))


def test_a_long_integer_as_an_argument_of_its_own_is_written_digit_by_digit(
    reader: Reader, make_calls: Callable[..., Constraint], call: Callable[..., str]
) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": LISTED[:4]}}, "required": ["x"]}
    calls = make_calls(CalledTool(name="f", parameters_json=json.dumps(schema)))
    for value in LISTED[:4]:
        assert reader.reads(calls, call("f", x=str(value)))
        assert not reader.reads(calls, call("f", x=str(value - 5)))


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_no_number_outside_its_bounds_can_be_written(reader: Reader, kind: str) -> None:
    num_read = 0
    for low, high in itertools.combinations(ENDS, 2):
        for lower, upper in (
            ("minimum", "maximum"),
            ("exclusiveMinimum", "exclusiveMaximum"),
        ):
            for a, b in ((low, high), (f"-{high}", f"-{low}")):
                schema = form(f'{{"type":"{kind}","{lower}":{a},"{upper}":{b}}}')
                num_read += _read_inside(reader, schema, Fraction(a), Fraction(b), kind, lower)
    assert num_read > 50  # what nobody can write is not outside either


def _read_inside(
    reader: Reader, schema: Constraint, a: Fraction, b: Fraction, kind: str, lower: str
) -> int:
    """How many numbers beside the bounds can be written, all of them inside."""
    beside = {
        format(Decimal(end.numerator) / Decimal(end.denominator) + sign * by, "f")
        for end in (a, b, Fraction(0))
        for by in BESIDE
        for sign in (1, -1)
    }
    texts = {str(int(Decimal(t))) for t in beside} if kind == "integer" else {*beside, "-0", "0.0"}
    if kind == "integer" and math.ceil(b) - math.floor(a) < 2:
        return 0  # there is none
    found = [Fraction(text) for text in texts if reader.reads(schema, text)]
    is_exclusive = lower == "exclusiveMinimum"
    for each in found:
        assert a < each < b or (not is_exclusive and each in (a, b)), (schema, each)
    return len(found)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 1e40},
        {"type": "integer", "maximum": -(10**30)},
        {"type": "number", "exclusiveMinimum": 10**19},
    ],
)
def test_a_bound_beyond_all_numbers_is_refused_by_name(
    vocabulary: EngineVocabulary, schema: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=r"(minimum|maximum|exclusiveMinimum) .* is beyond -?9"):
        compile_anew(form(schema), vocabulary)


def test_the_range_of_64_bit_integers_is_usable(reader: Reader) -> None:
    schema = form({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    for value in (0, -7, 1234567890123456789, -1234567890123456789):
        assert reader.reads(schema, str(value))
    assert not reader.reads(schema, str(2**63))


def test_bounds_of_draft_4_leave_out_their_end(reader: Reader) -> None:
    schema = form({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5})
    assert reader.reads(schema, "0.5")
    assert not reader.reads(schema, "0")
    kept = exact_numbers({"maximum": 3, "exclusiveMaximum": False}, "format")
    assert kept == {"maximum": 3}


def test_a_schema_without_numbers_stays_as_it_is() -> None:
    schema = {"type": "number", "enum": [True, None, "9007199254740993", {"a": [1]}]}
    assert exact_numbers(schema, "format") is schema
