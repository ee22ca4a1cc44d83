"""Whole steps with a constraint and other rules about tokens: ids, words, ends, budgets, blanks."""

import json
from typing import Any

import pytest

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.plan import FinishCode
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.errors import FailureReason
from shared.glm.tokenizer import GlmTokenizer
from shared.sampling import ThinkingBudget
from tests.services.worker.grammar.steps import POINT, Bench, choice, is_point, regex

NOW = CalledTool(name="now")
A_CALL = "<tool_call>now</tool_call>"


@pytest.fixture
def bench(compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> Bench:
    return Bench(compiler, tokenizer)


both_ways = pytest.mark.parametrize("drafts", [0, 3])


@both_ways
def test_what_a_request_only_dislikes_yields_to_the_grammar(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="yes")
    ids = bench.tokenizer.encode("yes", allow_control=False)
    disliked = bench.add(scheduler, choice("yes"), logit_bias=tuple((i, -100.0) for i in ids))
    scheduler.run()
    assert (disliked.code, bench.text(disliked)) == (FinishCode.EOS, "yes")


@both_ways
@pytest.mark.parametrize(
    "limits", [{"min_tokens": 50}, {"allowed_token_ids": "yes"}, {"bad_words": "<|endoftext|>"}]
)
def test_a_complete_text_ends_whatever_else_the_request_says(
    bench: Bench, drafts: int, limits: dict[str, Any]
) -> None:
    """At once: no end token is repeated until there are enough of them."""
    scheduler = bench.scheduler(drafts=drafts, liked="yes")
    given_ = {name: bench.limit(name, value) for name, value in limits.items()}
    one = bench.add(scheduler, choice("yes"), **given_)
    scheduler.run()
    ids = bench.tokenizer.encode("yes", allow_control=False)
    assert (one.error, one.code) == (None, FinishCode.EOS)
    assert one.outputs[:-1] == ids
    assert one.outputs[-1] in bench.eos


@both_ways
@pytest.mark.parametrize("limits", [{"allowed_token_ids": "no"}, {"bad_words": "~"}])
def test_a_request_that_leaves_nothing_of_its_grammar_fails_alone_and_says_so(
    bench: Bench, drafts: int, limits: dict[str, Any]
) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="yes")
    given_ = {name: bench.limit(name, value) for name, value in limits.items()}
    bad = bench.add(scheduler, regex("y~{9}s"), **given_)
    good = bench.add(scheduler, regex("y~{9}s"))
    scheduler.run()
    assert bad.error is not None
    assert bad.error.reason is FailureReason.INVALID_ARGUMENT
    assert "allowed_token_ids and bad_words" in bad.error.message
    assert not set(bad.outputs) - set(bench.tokenizer.encode("y", allow_control=False))
    assert bench.text(good) == "y~~~~~~~~~s"


@both_ways
def test_the_reason_is_told_also_behind_drafts_that_were_kept(bench: Bench, drafts: int) -> None:
    """Greedy, and a drafter that is right: the row gets stuck behind its last draft."""
    scheduler = bench.scheduler(drafts=drafts, liked="a")
    only = tuple(bench.tokenizer.encode("a", allow_control=False))
    for length in range(5, 9):
        one = bench.add(
            scheduler, regex(f"a{{{length}}}~"), allowed_token_ids=only, temperature=0.0
        )
        scheduler.run()
        assert one.error is not None
        assert "allowed_token_ids and bad_words" in one.error.message, length


@both_ways
def test_allowed_ids_and_a_grammar_leave_what_both_allow(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="abcdefgh")
    ids = {c: bench.tokenizer.encode(c, allow_control=False)[0] for c in "abcd1"}
    lives = [
        bench.add(scheduler, regex("[a-h]{30}"), seed=seed, allowed_token_ids=tuple(ids.values()))
        for seed in range(4)
    ]
    scheduler.run()
    for one in lives:
        assert (one.error, one.code) == (None, FinishCode.EOS)
        assert set(bench.text(one)) <= set("abcd")
        assert len(bench.text(one)) == 30
    assert len({bench.text(one) for one in lives}) == 4


@both_ways
def test_bad_words_do_not_come_where_the_grammar_has_others(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="ab")
    a, b = (bench.tokenizer.encode(c, allow_control=False)[0] for c in "ab")
    one = bench.add(scheduler, regex("[ab]{40}"), bad_words=((a, b), (b, b, b)))
    scheduler.run()
    text = bench.text(one)
    assert (one.code, len(text)) == (FinishCode.EOS, 40)
    assert "ab" not in text
    assert "bbb" not in text


@both_ways
def test_min_tokens_holds_as_long_as_the_grammar_can_go_on(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="a<|endoftext|><|user|>")
    lives = [
        bench.add(scheduler, regex("a+"), seed=seed, min_tokens=20, max_tokens=60)
        for seed in range(4)
    ]
    scheduler.run()
    assert all(len(one.outputs) > 20 for one in lives)
    assert all(set(bench.text(one)) == {"a"} for one in lives)


@both_ways
def test_a_stop_id_ends_the_text_where_the_grammar_has_it_and_nowhere_else(
    bench: Bench, drafts: int
) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="abc")
    c, z = (bench.tokenizer.encode(x, allow_control=False)[0] for x in "cz")
    inside = bench.add(scheduler, regex("[ab]{20}c[ab]+"), stop_token_ids=(c, z))
    scheduler.run()
    assert inside.code == FinishCode.STOP_TOKEN
    assert inside.outputs[-1] == c
    assert len(bench.text(inside)) == 21


@both_ways
def test_a_stop_id_that_is_no_text_may_follow_a_complete_text(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="yes<|assistant|>")
    own = bench.control.assistant
    one = bench.add(
        scheduler, choice("yes"), stop_token_ids=(own,), ignore_eos=True, logit_bias=((own, 50.0),)
    )
    scheduler.run()
    assert (one.code, one.outputs[-1]) == (FinishCode.STOP_TOKEN, own)
    assert bench.text(one).startswith("yes")


@both_ways
@pytest.mark.parametrize("budget", [0, 5])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"format": choice("yes").format}, "yes"),
        ({"calls": CallRules(tools=(NOW,), is_required=True, is_parallel=False)}, A_CALL),
    ],
)
def test_a_spent_thinking_budget_begins_the_grammar(
    bench: Bench, drafts: int, budget: int, form: dict[str, Any], text: str
) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="abc")
    end = bench.control.end_think
    constraint = Constraint(**form, start_after_token_id=end)
    limit = ThinkingBudget(
        max_tokens=budget, end_token_id=end, other_end_token_ids=(bench.control.tool_call,)
    )
    lives = [
        bench.add(scheduler, constraint, seed=seed, thinking_budget=limit) for seed in range(4)
    ]
    scheduler.run()
    for one in lives:
        assert (one.error, one.code) == (None, FinishCode.EOS)
        assert one.outputs.index(end) <= budget
        rest = one.outputs[one.outputs.index(end) + 1 : -1]
        assert bench.tokenizer.vocabulary.decode(rest) == text


@both_ways
def test_a_model_that_loves_blanks_still_writes_a_json_text_to_its_end(
    bench: Bench, drafts: int
) -> None:
    """Blanks between the parts and inside a string, whose end is liked second best."""
    scheduler = bench.scheduler(drafts=drafts)
    ids = bench.compiler.vocabulary.blanks
    quote = bench.tokenizer.encode('"', allow_control=False)[0]
    bias = (*((token, 100.0) for token in ids), (quote, 50.0))
    blanks = {"temperature": 0.0, "max_tokens": 390, "logit_bias": bias}
    loose = TextFormat(kind=FormatKind.JSON_SCHEMA, text=json.dumps(POINT))
    point = bench.add(scheduler, Constraint(format=loose), **blanks)
    words = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    closed = json.dumps(words | {"additionalProperties": False})
    text = TextFormat(kind=FormatKind.JSON_SCHEMA, text=closed)
    string = bench.add(scheduler, Constraint(format=text), **blanks)
    scheduler.run()
    assert [point.code, string.code] == [FinishCode.EOS, FinishCode.EOS]
    assert is_point(bench.text(point))
    assert json.loads(bench.text(string))["s"] == " " * 128
