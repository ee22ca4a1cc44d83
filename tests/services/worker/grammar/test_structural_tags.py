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


def test_free_text_has_nothing_in_it_that_is_excluded(reader: Reader, tag: Tag) -> None:
    value = tag({"format": {"type": "any_text", "excludes": ["bad", "wo\nrse", "<tool_call>"]}})
    assert reader.reads(value, "a b ad")
    for text in ("x bad", "wo\nrse"):
        assert not reader.reads(value, text), text
    inside = {"type": "tag", "begin": "<x>", "end": "</x>"}
    inside["content"] = {"type": "any_text", "excludes": ["bad"]}
    assert reader.reads(tag({"format": inside}), "<x>b a d</x>")
    assert not reader.reads(tag({"format": inside}), "<x>bad</x>")


def test_text_between_tags_has_no_trigger_and_nothing_excluded_in_it(
    reader: Reader, tag: Tag
) -> None:
    call = {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"}
    value = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [call], "excludes": ["no"]}
    for text in ("", "yes", "a<f>1</f>b<f>2</f>c"):
        assert reader.reads(tag({"format": value}), text), text
    for text in ("<f>", "a<f>x", "no", "no<f>1</f>", "<f>1</f>no"):
        assert not reader.reads(tag({"format": value}), text), text


def test_a_tag_may_have_several_ends(reader: Reader, tag: Tag) -> None:
    for content in ({"type": "any_text"}, {"type": "regex", "pattern": "a+"}):
        value = {"type": "tag", "begin": "<x>", "content": content, "end": ["</x>", "<|user|>"]}
        if content["type"] == "any_text":
            value["end"] = ["</x>", "</y>"]
        for end in value["end"]:  # type: ignore[attr-defined]  # a list
            assert reader.reads(tag({"format": value}), f"<x>aa{end}"), end
        assert not reader.reads(tag({"format": value}), "<x>aa</z>")


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
        ({"format": {"type": "json_schema"}}, "format.json_schema: a schema is a JSON object"),
        (
            {"format": {"type": "json_schema", "json_schema": {"minimum": "x"}}},
            "format.json_schema: minimum must be a number, not 'x'",
        ),
        (
            {"structures": [{"begin": "<", "schema": {"enum": []}, "end": ">"}], "triggers": ["<"]},
            r"tags\[0\].content.json_schema: enum must be an array that is not empty",
        ),
        ({"format": {"type": "any_text", "excludes": "x"}}, "excludes must be an array of texts"),
        ({"format": {"type": "any_text", "style": "x"}}, "format.style is not one of type, excl"),
        (
            {"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": []}},
            "end must be a text or an array of texts",
        ),
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
