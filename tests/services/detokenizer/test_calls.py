import json

import pytest

from tests.services.detokenizer.outputs import TOOLS, machine, run, show
from tests.services.detokenizer.words import ids

GET = "<tool_call>get_weather"
CITY = "<arg_key>city</arg_key><arg_value>"
DAYS = "<arg_key>days</arg_key><arg_value>"
END = "</arg_value></tool_call>"


def test_the_name_comes_whole_with_the_first_argument() -> None:
    made, tokens = machine(), ids(GET + CITY + "Par")
    seen = []
    for token in tokens:
        made.push(token)
        seen.extend((p.call_id, p.name, p.arguments) for p in made.take().merged_tools())
    assert seen == [
        ("call_0", "get_weather", ""),
        ("", "", '{"city": "'),
        ("", "", "P"),
        ("", "", "a"),
        ("", "", "r"),
    ]


def test_strings_stream_and_other_values_come_when_they_are_complete() -> None:
    shown = show(GET + DAYS + "1234</arg_value>" + CITY + "ab" + END)
    assert shown.arguments == ['{"days": ', "1234", ', "city": "', "a", "b", '"', "}"]


def test_nullable_strings_wait_for_their_end() -> None:
    tools = {"f": {"properties": {"s": {"type": ["string", "null"]}}}}
    shown = show("<tool_call>f<arg_key>s</arg_key><arg_value>ab" + END, tools=tools)
    assert shown.arguments == ['{"s": ', '"ab"', "}"]


def test_a_call_without_arguments_is_one_piece() -> None:
    shown = show("<tool_call>now</tool_call>")
    assert [(p.name, p.arguments) for d in shown.deltas for p in d.tools] == [("now", "{}")]


def test_every_call_has_its_own_index_and_id() -> None:
    now = "<tool_call>now</tool_call>"
    shown = show(now + "<tool_call>nope</tool_call>" + GET + CITY + "a" + END + now)
    assert [call["id"] for call in shown.calls] == ["call_0", "call_1", "call_2"]
    assert shown.named == [("now", "{}"), ("get_weather", '{"city": "a"}'), ("now", "{}")]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # a closing tag counts only in front of a key or the end of the call
        ("a</arg_value>b</arg_value> \n</tool_call>", {"city": "a</arg_value>b"}),
        ("a</arg_value> b" + END, {"city": "a</arg_value> b"}),
        ("a</arg_value></arg_value></tool_call>", {"city": "a</arg_value>"}),
        # other tags inside a value are text
        ("<think>x</think><arg_key>" + END, {"city": "<think>x</think><arg_key>"}),
        ("<tool_call>now" + END, {"city": "<tool_call>now"}),
        ("a<|user|>b" + END, {"city": "ab"}),
        # the missing closer
        ("Paris</tool_call>", {"city": "Paris"}),
        (' "q"\n\t' + END, {"city": ' "q"\n\t'}),
        ("a</arg_value>\n" + DAYS + " 2 </arg_value></tool_call>", {"city": "a", "days": 2}),
        ("a</arg_value>" + CITY + "b" + END, {"city": "a"}),
    ],
)
def test_values_are_kept_as_they_are(text: str, arguments: dict[str, object]) -> None:
    made = machine()
    shown = run(made, ids(GET + CITY + text))
    assert json.loads(shown.named[0][1]) == arguments
    assert made.num_calls == 1


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<arg_key>city</arg_key>Paris</arg_value></tool_call>", {"city": "Paris"}),
        ("<arg_key>city</arg_key>\nParis</tool_call>", {"city": "Paris"}),
        ("<arg_key>city</arg_key>A" + DAYS + "1" + END, {"city": "A", "days": 1}),
        ("<arg_key>city<arg_value>A" + END, {"city": "A"}),
        ("<arg_key>x<arg_key>city</arg_key><arg_value>A" + END, {"city": "A"}),
        ("<arg_key>city</arg_key> : <arg_value>A" + END, {"city": "A"}),
        ("<arg_key>city</arg_key></tool_call>", {"city": ""}),
        ("<arg_key> city \n</arg_key><arg_value>A" + END, {"city": "A"}),
        ("<arg_key></arg_key><arg_value>A" + END, {}),
        ("<arg_key>ci</tool_call>", {}),
        ("<arg_value>A" + END, {}),
    ],
)
def test_layout_that_is_not_the_templates_is_recovered(
    text: str, arguments: dict[str, object]
) -> None:
    shown = show(GET + text)
    assert json.loads(shown.named[0][1]) == arguments


def test_a_second_opener_begins_the_next_call() -> None:
    shown = show(GET + CITY + "a</arg_value>" + "<tool_call>now</tool_call>")
    assert shown.named == [("get_weather", '{"city": "a"}'), ("now", "{}")]
    assert show("<tool_call>now<tool_call>now</tool_call>").named == [("now", "{}")] * 2


def test_an_opener_in_prose_is_prose() -> None:
    shown = show("use <tool_call> to call: ok")
    assert (shown.content, shown.calls) == ("use  to call: ok", [])


def test_a_think_tag_behind_an_opener_is_a_think_tag() -> None:
    shown = show("<tool_call>hm<think>R</think>C")
    assert (shown.reasoning, shown.content) == ("R", "hmC")


def test_long_prose_behind_an_opener_does_not_wait_for_the_end() -> None:
    made = machine()
    for token in ids("<tool_call>" + "word " * 60):
        made.push(token)
    assert "".join(made.take().content).startswith("word word")


def test_an_undeclared_tool_is_dropped_whole_and_counted() -> None:
    made = machine()
    shown = run(made, ids("hi<tool_call>nope<arg_key>a</arg_key><arg_value>1" + END))
    assert (shown.content, shown.calls, made.num_dropped_calls) == ("hi", [], 1)


def test_only_the_named_tool_is_called_under_a_named_choice() -> None:
    shown = show(GET + CITY + "a" + END + "<tool_call>now</tool_call>", allowed=["now"])
    assert shown.named == [("now", "{}")]


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "get_weather", "arguments": {"city": "é"}}',
        ' {"name": "get_weather", "parameters": {"city": "é"}} ',
        '{"function": {"name": "get_weather", "arguments": "{\\"city\\": \\"é\\"}"}}',
    ],
)
def test_a_call_written_as_json_is_a_call(body: str) -> None:
    assert show(f"<tool_call>{body}</tool_call>").named == [("get_weather", '{"city": "é"}')]


@pytest.mark.parametrize(
    "body", ['{"name": 3}', '{"name": "now", "arguments": [1]}', "{", "{{}}", "no tool of mine"]
)
def test_what_can_be_no_call_is_content(body: str) -> None:
    shown = show(f"a <tool_call>{body}</tool_call> b")
    assert (shown.content, shown.calls) == (f"a {body} b", [])


def test_json_calls_of_tools_that_are_not_allowed_are_dropped_and_counted() -> None:
    made = machine(allowed=["raw"])
    shown = run(made, ids('<tool_call>{"name": "now"}</tool_call>'))
    assert (shown.content, shown.calls, made.num_dropped_calls) == ("", [], 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<tool_call>now", [("now", "{}")]),
        (GET + "<arg_key>", [("get_weather", "{}")]),
        (GET + "<arg_key>ci", [("get_weather", "{}")]),
        (GET + "<arg_key>city</arg_key>Paris", [("get_weather", '{"city": "Paris"}')]),
        (GET + CITY + "Par", [("get_weather", '{"city": "Par"}')]),
        (GET + CITY + "Paris</arg_value>", [("get_weather", '{"city": "Paris"}')]),
        (GET + DAYS + "1", [("get_weather", '{"days": 1}')]),
    ],
)
def test_a_model_that_ended_by_itself_left_out_the_closing_tags(
    text: str, named: list[tuple[str, str]]
) -> None:
    made = machine()
    assert run(made, ids(text)).named == named
    assert made.num_calls == len(named)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("<tool_call>get_wea", []),
        ("<tool_call>now", []),
        ('<tool_call>{"name": "no', []),
        (GET + "<arg_key>ci", [("get_weather", "")]),
        (GET + CITY + "Par", [("get_weather", '{"city": "Par')]),
        (GET + DAYS + "1", [("get_weather", '{"days": ')]),
        (GET + CITY + "Paris</arg_value>", [("get_weather", '{"city": "Paris')]),
    ],
)
def test_a_call_that_was_cut_is_never_presented_as_complete(
    text: str, named: list[tuple[str, str]]
) -> None:
    made = machine()
    shown = run(made, ids("hi " + text), is_cut=True)
    assert shown.named == named
    assert made.num_calls == 0
    assert shown.content.rstrip() == "hi"


def test_tools_of_the_fixture_are_what_these_tests_assume() -> None:
    assert set(TOOLS) == {"get_weather", "now", "raw"}
