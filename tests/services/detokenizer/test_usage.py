import json

from services.detokenizer.build import build_response
from services.detokenizer.usage import Usage, count_usage, total_stats
from shared.sampling import SequenceStats
from tests.services.detokenizer.frames import CONTEXT, submit
from tests.services.detokenizer.words import ids


def test_the_object_has_openais_keys() -> None:
    usage = Usage(
        num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=5, num_reasoning_tokens=2
    )
    assert json.loads(usage.to_json()) == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_without_reasoning_there_are_no_details_of_it() -> None:
    usage = Usage(
        num_prompt_tokens=3, num_cached_tokens=0, num_output_tokens=5, num_reasoning_tokens=None
    )
    assert "completion_tokens_details" not in json.loads(usage.to_json())


def test_a_prompt_that_choices_share_counts_once() -> None:
    choices = build_response(submit(4), CONTEXT, 0.0).choices
    for choice in choices:
        choice.feed(ids("ab"), None)
        choice.stats = SequenceStats(num_cached_tokens=2)
    shared = count_usage(choices, num_choices_per_prompt=2, has_reasoning=True)
    assert (shared.num_prompt_tokens, shared.num_cached_tokens) == (6, 4)
    assert shared.num_output_tokens == 8


def test_total_stats_add_counts_and_take_the_longest_times() -> None:
    choices = build_response(submit(2), CONTEXT, 0.0).choices
    choices[0].stats = SequenceStats(queue_us=5, decode_us=1, num_preemptions=1)
    choices[1].stats = SequenceStats(queue_us=3, decode_us=9, num_preemptions=2)
    usage = count_usage(choices, num_choices_per_prompt=2, has_reasoning=False)
    stats = total_stats(choices, usage)
    assert (stats.queue_us, stats.decode_us, stats.num_preemptions) == (5, 9, 3)
    assert stats.num_prompt_tokens == 3


def test_drafts_are_told_where_there_were_any() -> None:
    choices = build_response(submit(2), CONTEXT, 0.0).choices
    for choice in choices:
        choice.num_drafted_tokens, choice.num_accepted_tokens = 6, 4
    usage = count_usage(choices, num_choices_per_prompt=2, has_reasoning=False)
    details = json.loads(usage.to_json())["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 4}
    before = json.loads(usage.before_output().to_json())
    assert "completion_tokens_details" not in before
