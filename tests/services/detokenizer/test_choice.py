from dataclasses import replace
from typing import Any

import pytest

from services.detokenizer.choice import Choice, ChoiceRules
from services.detokenizer.plain import PlainText
from services.detokenizer.stops import StopAutomaton, StopMatcher
from shared.endings import FinishReason
from tests.services.detokenizer.frames import finished, logprobs
from tests.services.detokenizer.outputs import machine
from tests.services.detokenizer.words import EOS, VOCABULARY, ids

NEWLINE = ord("\n")


def choice(stops: list[str] | None = None, *, included: bool = False, **rules: Any) -> Choice:
    matcher = None
    if stops:
        matcher = StopMatcher(StopAutomaton(stops), is_included=included)
        matcher.is_armed = False
    defaults = ChoiceRules(
        vocabulary=VOCABULARY,
        stop_ids=frozenset({EOS, NEWLINE}),
        eos_ids=frozenset({EOS}),
        has_stop_strings=bool(stops),
        shows_stop_token=included,
    )
    text = PlainText(VOCABULARY, skips_special_tokens=True, stops=matcher)
    return Choice(0, 3, text, replace(defaults, **rules))


def content(made: Choice) -> str:
    return "".join(made.text.take().content)


def test_the_ending_token_is_counted_and_not_shown() -> None:
    made = choice()
    made.feed([*ids("ab"), NEWLINE], None)
    made.finish(finished(stop_token_id=NEWLINE))
    assert made.end is not None
    assert (content(made), made.num_tokens, made.end.stop_reason) == ("ab", 3, NEWLINE)


def test_the_primary_end_gives_no_stop_reason() -> None:
    made = choice()
    made.feed([*ids("ab"), EOS], None)
    made.finish(finished())
    assert made.end is not None
    assert (made.end.finish_reason, made.end.stop_reason) == ("stop", None)


def test_a_stop_id_that_did_not_end_the_sequence_is_text() -> None:
    made = choice()
    made.feed([NEWLINE, *ids("a")], None)
    assert content(made) == "\na"
    made.feed([NEWLINE], None)
    made.finish(finished(FinishReason.LENGTH))
    assert made.end is not None
    assert (content(made), made.end.finish_reason) == ("\n", "length")


def test_the_stop_token_is_shown_when_asked_for() -> None:
    made = choice(included=True)
    made.feed([*ids("a"), NEWLINE], None)
    made.finish(finished(stop_token_id=NEWLINE))
    assert content(made) == "a\n"


@pytest.mark.parametrize("group", [1, 2, 100])
def test_a_stop_string_cuts_ids_logprobs_and_usage_at_the_completing_token(group: int) -> None:
    made = choice(["END"], keeps_ids=True, keeps_logprobs=True)
    tokens = ids("ab ENDcd")
    for start in range(0, len(tokens), group):
        made.feed(tokens[start : start + group], logprobs(len(tokens[start : start + group])))
    assert made.is_stopped
    assert made.end is not None
    assert (content(made), made.num_tokens, made.end.stop_reason) == ("ab ", 6, "END")
    assert made.token_ids == tokens[:6]
    assert len(made.logprobs) == 6


def test_stop_strings_wait_for_more_than_min_tokens() -> None:
    made = choice(["b"], min_tokens=2)
    made.feed(ids("ab"), None)
    assert not made.is_stopped
    made.feed(ids("b"), None)
    assert made.is_stopped
    assert content(made) == "ab"


def test_a_stop_id_inside_a_stop_string_completes_it_late_but_counts_right() -> None:
    made = choice(["a\n"])
    made.feed([*ids("xa"), NEWLINE, *ids("y")], None)
    assert made.is_stopped
    assert (content(made), made.num_tokens) == ("x", 3)


def test_the_ends_of_a_stopped_choice_are_ignored() -> None:
    made = choice(["b"])
    made.feed(ids("ab"), None)
    made.feed(ids("cd"), None)
    made.finish(finished(FinishReason.ABORT, num_cached_tokens=2))
    assert made.end is not None
    assert (made.end.finish_reason, made.num_tokens) == ("stop", 2)
    assert made.stats.num_cached_tokens == 2


def with_machine(**options: Any) -> Choice:
    rules = ChoiceRules(
        vocabulary=VOCABULARY, stop_ids=frozenset({EOS}), eos_ids=frozenset({EOS}), **options
    )
    return Choice(0, 3, machine(starts_in_reasoning=True), rules)


@pytest.mark.parametrize(
    ("text", "reason", "expected"),
    [
        ("</think><tool_call>now</tool_call>", FinishReason.STOP, "tool_calls"),
        ("</think><tool_call>now</tool_call>", FinishReason.LENGTH, "length"),
        ("</think><tool_call>now", FinishReason.STOP, "tool_calls"),
        ("</think><tool_call>now", FinishReason.LENGTH, "length"),
        ("</think><tool_call>nope</tool_call>", FinishReason.STOP, "stop"),
        ("</think>sorry", FinishReason.STOP, "stop"),
        ("<tool_call>now</tool_call>", FinishReason.STOP, "tool_calls"),
    ],
)
def test_tool_calls_is_the_reason_only_with_a_complete_call(
    text: str, reason: FinishReason, expected: str
) -> None:
    made = with_machine()
    made.feed([*ids(text), *([EOS] if reason is FinishReason.STOP else [])], None)
    made.finish(finished(reason))
    assert made.end is not None
    assert made.end.finish_reason == expected


def test_a_stop_id_of_the_client_cuts_a_call() -> None:
    made = with_machine()
    made.feed(ids("</think><tool_call>now"), None)
    made.finish(finished(stop_token_id=99))
    assert made.end is not None
    assert (made.end.finish_reason, made.text.num_calls) == ("stop", 0)


def test_a_named_call_ends_with_stop() -> None:
    made = with_machine(is_named_call=True)
    made.feed([*ids("</think><tool_call>now</tool_call>"), EOS], None)
    made.finish(finished())
    assert made.end is not None
    assert made.end.finish_reason == "stop"


def test_hidden_reasoning_hides_its_ids_and_logprobs() -> None:
    made = with_machine(keeps_ids=True, keeps_logprobs=True, hides_reasoning=True)
    tokens = ids("ab</think>cd")
    made.feed(tokens, logprobs(len(tokens)))
    assert made.token_ids == ids("cd")
    assert [entry.token_id for entry in made.logprobs] == ids("cd")


def test_full_stats_count_what_was_kept() -> None:
    made = choice()
    made.feed(ids("ab"), None)
    made.finish(finished(FinishReason.LENGTH, num_output_tokens=9, queue_us=5))
    stats = made.full_stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.queue_us) == (3, 2, 5)
