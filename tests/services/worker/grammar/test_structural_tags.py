"""Structural tags in both notations."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.constraint import Constraint, FormatKind
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader

Make = Callable[..., Constraint]
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OLDER = {
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
CALL = {"begin": "<tool_call>now", "content": {"type": "any_text"}, "end": "</tool_call>"}


@pytest.fixture
def tag(make_format: Make) -> Callable[[Any], Constraint]:
    return lambda value: make_format(FormatKind.STRUCTURAL_TAG, json.dumps(value))


Tag = Callable[[Any], Constraint]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("just text", True),
        ('see <f=a>{"x": 1}</f> and <f=b>true</f>.', True),
        ("see <f=c>", False),
        ('see <f=a>{"y": 1}', False),
        ("see <f=b>true</f", False),
    ],
)
def test_behind_a_trigger_stands_one_of_its_structures(
    reader: Reader, tag: Tag, text: str, is_good: bool
) -> None:
    assert reader.reads(tag(OLDER), text) is is_good


def test_a_trigger_that_spells_a_control_token_is_that_token(reader: Reader, tag: Tag) -> None:
    value = {"format": {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}}
    assert reader.reads(tag(value), "a <tool_call>now</tool_call> b")
    assert not reader.begins(tag(value), "a <tool_call>then")
    # The same characters as ordinary text are text.
    matcher_text = reader.tokenizer.encode("a <tool_call>then", allow_control=False)
    assert reader.tokenizer.added_tokens["<tool_call>"] not in matcher_text


def test_tags_may_be_required_and_single(reader: Reader, tag: Tag) -> None:
    base = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [CALL]}
    one = "<tool_call>now</tool_call>"
    some = tag({"format": {**base, "at_least_one": True}})
    assert not reader.reads(some, "text")
    assert reader.reads(some, one + one + "x")
    single = tag({"format": {**base, "at_least_one": True, "stop_after_first": True}})
    assert reader.reads(single, one)
    assert not reader.begins(single, one + "x")


def test_parts_follow_each_other_and_alternate(reader: Reader, tag: Tag) -> None:
    value = {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "A:"},
                {
                    "type": "or",
                    "elements": [
                        {"type": "regex", "pattern": "[0-9]+"},
                        {"type": "json_schema", "json_schema": {"type": "boolean"}},
                        {"type": "grammar", "grammar": 'start: "none"'},
                    ],
                },
                {"type": "tag", "begin": "<x>", "content": {"type": "any_text"}, "end": "</x>"},
                {
                    "type": "tags_with_separator",
                    "separator": ",",
                    "tags": [
                        {"begin": "[", "content": {"type": "regex", "pattern": "a+"}, "end": "]"}
                    ],
                },
            ],
        }
    }
    for text in ("A:12<x>a<b</x>", "A:true<x></x>[aa],[a]", "A:none<x>y</x>[a]"):
        assert reader.reads(tag(value), text), text
    for text in ("A:x", "B", "A:1<x>y</x>[b", "A:1<x>y</x>[a],"):
        assert not reader.reads(tag(value), text), text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "'format', or 'structures' and 'triggers'"),
        ([], "is a JSON object"),
        ({"format": {"type": "qwen"}}, "'qwen' is not one of"),
        ({"format": {"type": "const_string"}}, "value must be a text"),
        ({"format": {"type": "sequence", "elements": []}}, "elements must be an array"),
        ({"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}, "none of"),
        ({"structures": [3], "triggers": ["<"]}, r"structures\[0\] must be an object"),
    ],
)
def test_a_tag_that_is_none_is_refused_where_it_is_wrong(
    reader: Reader, tag: Tag, value: Any, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        reader.reads(tag(value), "")


def test_a_tag_that_nests_without_end_is_refused(reader: Reader, tag: Tag) -> None:
    value: Any = {"type": "any_text"}
    for _ in range(40):
        value = {"type": "sequence", "elements": [value]}
    with pytest.raises(RequestError, match="nests deeper"):
        reader.reads(tag({"format": value}), "")
