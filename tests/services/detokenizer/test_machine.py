import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.detokenizer.outputs import machine, run, show
from tests.services.detokenizer.words import VOCABULARY, WORDS, ids

CONTROL = VOCABULARY.control
TAGS = [
    CONTROL.think,
    CONTROL.end_think,
    CONTROL.tool_call,
    CONTROL.end_tool_call,
    CONTROL.arg_key,
    CONTROL.end_arg_key,
    CONTROL.arg_value,
    CONTROL.end_arg_value,
    CONTROL.tool_response,
    CONTROL.user,
    CONTROL.end_of_text,
]
# Random ids seldom make calls, so most pieces are parts of calls.
PIECES = [
    *([tag] for tag in TAGS),
    *(ids(word) for word in [*WORDS, "raw", "nope", "days", "1", " ", "\n", "{", "a", "x y"]),
    [0xF0],
    [0x9F, 0x98],
    ids("<tool_call>get_weather<arg_key>city</arg_key><arg_value>"),
    ids("</arg_value><arg_key>days</arg_key><arg_value>"),
    ids("</arg_value></tool_call>"),
    ids("<tool_call>now</tool_call>"),
]
sequences = st.lists(st.sampled_from(PIECES), max_size=30).map(
    lambda pieces: [token for piece in pieces for token in piece]
)
groupings = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(
    sequences,
    groupings,
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, ["now"], []]),
    st.sampled_from([(), ("a",), ("\n", "x y"), ("Paris", "ris 12")]),
)
def test_streamed_equals_unstreamed_for_any_tokens(
    tokens: list[int],
    groups: list[int],
    starts: bool,
    is_cut: bool,
    allowed: Sequence[str] | None,
    stops: Sequence[str],
) -> None:
    results = []
    for grouping in (groups, [1], [0]):
        made = machine(allowed=allowed, starts_in_reasoning=starts, stops=stops)
        shown = run(made, tokens, groups=grouping, is_cut=is_cut)
        results.append(
            (shown.reasoning, shown.content, shown.calls, made.num_calls, made.num_reasoning_tokens)
        )
        for index, (_, arguments) in enumerate(shown.named):
            if index < made.num_calls:
                assert isinstance(json.loads(arguments, parse_constant=pytest.fail), dict)
            else:
                assert is_cut or made.matched, "only a cut leaves a call open"
                assert index == len(shown.calls) - 1, "only the last call can be open"
    assert results[0] == results[1] == results[2]


@given(sequences, st.booleans())
def test_no_spelling_of_a_marker_is_shown_outside_arguments(
    tokens: list[int], starts: bool
) -> None:
    shown = run(machine(starts_in_reasoning=starts), tokens)
    for tag in VOCABULARY.added_ids:
        assert VOCABULARY.token_strings[tag] not in shown.reasoning + shown.content


@pytest.mark.parametrize("bad", [[0xFF], [0xF0, 0x9F], [0xE6]])
def test_bytes_that_are_no_text_end_at_a_marker(bad: list[int]) -> None:
    shown = run(machine(starts_in_reasoning=True), [*ids("R"), *bad, CONTROL.end_think, *ids("C")])
    assert (shown.reasoning, shown.content) == ("R�", "C")


def test_a_stray_end_of_thinking_and_other_markers_are_not_shown() -> None:
    assert show("a</think>b</tool_call>c<arg_key>d<|user|>e").content == "abcde"


def test_whitespace_before_a_call_is_dropped_and_elsewhere_kept() -> None:
    assert show("a \n<tool_call>now</tool_call>\n\n").content == "a"
    assert show("a \n").content == "a \n"
    assert show("\n\n<tool_call>now</tool_call> \nb \n").content == " \nb \n"


def test_a_swallowed_call_leaves_the_text_around_it_alone() -> None:
    shown = show("a \n<tool_call>now</tool_call> b\n", allowed=[])
    assert shown.content == "a \n b\n"
    assert not shown.calls


def test_trailing_whitespace_of_reasoning_is_dropped_also_when_never_closed() -> None:
    shown = show("\nR \n", starts_in_reasoning=True)
    assert (shown.reasoning, shown.content) == ("\nR", "")


def test_a_think_block_that_is_never_closed_is_reasoning() -> None:
    made = machine(starts_in_reasoning=True)
    shown = run(made, ids("a long thought"), is_cut=True)
    assert shown.reasoning == "a long thought"
    assert not shown.content


def test_reasoning_tokens_are_counted_without_the_tags() -> None:
    made = machine(starts_in_reasoning=True)
    run(made, ids("abc</think>de<think>f</think>g"))
    assert made.num_reasoning_tokens == 4


def test_without_a_reasoning_parser_the_tags_are_content() -> None:
    shown = show("a<think>b</think>c", starts_in_reasoning=True, parses_reasoning=False)
    assert (shown.reasoning, shown.content) == ("", "a<think>b</think>c")


def test_stop_strings_match_content_only() -> None:
    text = "STOP</think>a<tool_call>raw<arg_key>k</arg_key><arg_value>STOP</arg_value></tool_call>"
    made = machine(starts_in_reasoning=True, stops=["STOP"])
    shown = run(made, ids(text + "bSTOPc"))
    assert made.matched == "STOP"
    assert (shown.reasoning, shown.content) == ("STOP", "ab")
    assert shown.named == [("raw", '{"k": "STOP"}')]


def test_a_whitespace_stop_string_matches_at_once() -> None:
    made = machine(stops=["\n\n"])
    tokens = ids("a\n\n")
    for token in tokens:
        made.push(token)
    assert made.matched == "\n\n"


def test_a_held_back_beginning_is_content_in_front_of_a_call() -> None:
    made = machine(stops=["ab"])
    shown = run(made, ids("xa<tool_call>now</tool_call>b"))
    assert made.matched is None
    assert shown.content == "xab"


def test_text_of_a_call_that_was_none_can_match_a_stop_string() -> None:
    made = machine(stops=["END"])
    shown = run(made, ids("a<tool_call>some END<tool_call>"))
    assert made.matched == "END"
    assert shown.content == "asome "
