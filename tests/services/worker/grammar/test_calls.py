"""Grammars of tool calls."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.constraint import CalledTool, Constraint
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader

Make = Callable[..., Constraint]
Call = Callable[..., str]
NOW = CalledTool(name="now")
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city"],
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    },
}


def tool(schema: Any = WEATHER_SCHEMA, *, is_strict: bool = False) -> CalledTool:
    return CalledTool(name="get_weather", parameters_json=json.dumps(schema), is_strict=is_strict)


@pytest.fixture
def weather(make_calls: Make) -> Constraint:
    return make_calls(tool(), NOW)


def test_declared_calls_are_read_one_or_several(
    reader: Reader, weather: Constraint, call: Call
) -> None:
    assert reader.reads(weather, call("now"))
    assert reader.reads(weather, call("get_weather", city="New <b> York\n", days="3"))
    assert reader.reads(weather, call("now") + call("get_weather", city="x", where='{"x": 1.5}'))


def test_nothing_but_calls_can_be_written(reader: Reader, weather: Constraint) -> None:
    assert reader.next_tokens(weather, "") == {"<tool_call>"}
    assert not reader.begins(weather, "Sure")


def test_an_unknown_name_is_impossible(reader: Reader, weather: Constraint, call: Call) -> None:
    for name in ("nope", "nowadays", "get_weathe", ""):
        assert not reader.begins(weather, call(name))


def test_keys_are_declared_ones_once_in_the_order_of_the_schema(
    reader: Reader, weather: Constraint, call: Call
) -> None:
    assert not reader.begins(weather, call("get_weather", country="x"))
    assert not reader.begins(weather, call("get_weather", days="3", city="x"))
    twice = "<arg_key>city</arg_key><arg_value>a</arg_value>" * 2
    assert not reader.begins(weather, f"<tool_call>get_weather{twice}")


def test_required_arguments_are_there(reader: Reader, weather: Constraint, call: Call) -> None:
    assert not reader.begins(weather, call("get_weather"))
    assert not reader.begins(weather, call("get_weather", days="3"))


@pytest.mark.parametrize("value", ["x", "3.5", "03", '"3"', ""])
def test_a_value_that_is_no_string_is_json_of_its_schema(
    reader: Reader, weather: Constraint, call: Call, value: str
) -> None:
    assert not reader.begins(weather, call("get_weather", city="x", days=value))


def test_listed_values_are_written_as_they_are_read(
    reader: Reader, make_calls: Make, call: Call
) -> None:
    values = {"properties": {"v": {"enum": ["on", 2, None, {"a": 1}]}}, "required": ["v"]}
    constraint = make_calls(tool(values))
    for value in ("on", "2", "null", '{"a": 1}'):
        assert reader.reads(constraint, call("get_weather", v=value)), value
    for value in ('"on"', "3", "off"):
        assert not reader.begins(constraint, call("get_weather", v=value)), value


def test_a_reference_inside_a_value_is_followed(
    reader: Reader, weather: Constraint, call: Call
) -> None:
    assert reader.reads(weather, call("get_weather", city="x", where='{"x": 2}'))
    assert not reader.begins(weather, call("get_weather", city="x", where='{"y": 2}'))


def test_json_values_stand_on_one_line_as_the_template_writes_them(
    reader: Reader, weather: Constraint, call: Call
) -> None:
    assert not reader.begins(weather, call("get_weather", city="x", where='{\n"x": 2}'))


def test_a_single_call_is_the_end(reader: Reader, make_calls: Make, call: Call) -> None:
    constraint = make_calls(NOW, is_parallel=False)
    assert reader.reads(constraint, call("now"))
    assert not reader.begins(constraint, call("now") + "<tool_call>")


def test_an_open_object_takes_any_keys_with_raw_text(
    reader: Reader, make_calls: Make, call: Call
) -> None:
    constraint = make_calls(tool({"type": "object"}))
    assert reader.reads(constraint, call("get_weather", anything="goes", more="1"))
    assert not reader.begins(make_calls(NOW), call("now", x="1"))


def test_text_of_a_strict_tool_follows_its_schema(
    reader: Reader, make_calls: Make, call: Call
) -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"type": "string", "format": "date"}},
        "required": ["day"],
        "additionalProperties": False,
    }
    strict, lax = make_calls(tool(schema, is_strict=True)), make_calls(tool(schema))
    assert reader.reads(strict, call("get_weather", day="2026-01-31"))
    assert not reader.begins(strict, call("get_weather", day="tomorrow"))
    assert reader.reads(lax, call("get_weather", day="tomorrow"))


def test_no_tool_at_all_is_refused(reader: Reader, make_calls: Make) -> None:
    with pytest.raises(RequestError, match="no tool"):
        reader.reads(make_calls(), "")
