"""Whole steps with constraints: a model that says anything at all still writes valid text.

The decoder's logits are a hash of the context, so it is a random model; the drafter knows them
before they are masked.
"""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.plan import FinishCode
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.errors import FailureReason
from shared.glm.tokenizer import GlmTokenizer
from tests.services.worker.fake_decoder import make_executor
from tests.services.worker.grammar.steps import POINT, Bench, is_point, schema
from tests.services.worker.plans import MiniScheduler

WEATHER = CalledTool(
    name="get_weather",
    parameters_json=json.dumps(
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 4},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["city"],
        }
    ),
    is_strict=True,
)
NOW = CalledTool(name="now")


@pytest.fixture
def bench(compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> Bench:
    return Bench(compiler, tokenizer)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_random_model_writes_valid_json_with_any_seed(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts)
    lives = [bench.add(scheduler, schema(POINT), seed=seed) for seed in range(6)]
    lives.append(bench.add(scheduler, schema(POINT), temperature=0.0))
    free = bench.add(scheduler, None, max_tokens=12)
    scheduler.run()
    assert all(one.code == FinishCode.EOS for one in lives)
    assert all(is_point(bench.text(one)) for one in lives)
    assert len({bench.text(one) for one in lives[:6]}) > 1
    assert free.error is None
    assert len(free.outputs) == 12


@pytest.mark.parametrize("skill", [0.0, 0.7, 1.0])
def test_tokens_under_a_grammar_do_not_depend_on_drafts(bench: Bench, skill: float) -> None:
    liked = '{"x":1,"name":"abc","kind":"round"}'
    texts = []
    for drafts in (0, 1, 3):
        scheduler = bench.scheduler(drafts=drafts, skill=skill, liked=liked)
        lives = [bench.add(scheduler, schema(POINT), seed=seed) for seed in range(5)]
        scheduler.run()
        assert all(is_point(bench.text(one)) for one in lives)
        texts.append([one.outputs for one in lives])
    assert texts[0] == texts[1] == texts[2]


def test_drafts_that_the_grammar_allows_are_kept(bench: Bench) -> None:
    """Greedy, and a model that writes one letter for ever: the draft is what the mask leaves."""
    scheduler = bench.scheduler(drafts=3, liked="a")
    one = bench.add(
        scheduler,
        Constraint(format=TextFormat(kind=FormatKind.REGEX, text="[a-z]{40}")),
        temperature=0.0,
    )
    scheduler.run()
    assert len(bench.text(one)) == 40
    assert sum(kept for _, kept in one.drafted) > 5


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_resumed_sequence_goes_on_in_its_grammar(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts)
    plain = bench.add(scheduler, schema(POINT), seed=7)
    scheduler.run()
    for num_before in (1, 4, len(plain.outputs) - 1):
        scheduler = bench.scheduler(drafts=drafts)
        one = bench.add(scheduler, schema(POINT), seed=7)
        while len(one.outputs) < num_before and not one.is_done:
            scheduler.run_step()
        if not one.is_done:
            scheduler.preempt(one)
        scheduler.run()
        assert (one.error, one.outputs) == (None, plain.outputs)


@pytest.mark.parametrize("drafts", [0, 3])
def test_thinking_is_free_and_must_be_closed_before_the_text(bench: Bench, drafts: int) -> None:
    scheduler = bench.scheduler(drafts=drafts, liked="</think>ab")
    end = bench.control.end_think
    constraint = Constraint(format=schema({"enum": ["yes", "no"]}).format, start_after_token_id=end)
    lives = [bench.add(scheduler, constraint, seed=seed, max_tokens=300) for seed in range(6)]
    scheduler.run()
    for one in lives:
        assert one.code == FinishCode.EOS
        place = one.outputs.index(end)
        assert not set(one.outputs[:place]) & {*bench.eos, bench.control.tool_call}
        decoded = bench.tokenizer.vocabulary.decode(one.outputs[place + 1 : -1])
        assert decoded in ('"yes"', '"no"')
    assert max(one.outputs.index(end) for one in lives) > 0


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_calls_of_declared_tools_and_nothing_else(
    bench: Bench, drafts: int, is_parallel: bool
) -> None:
    scheduler = bench.scheduler(drafts=drafts)
    rules = CallRules(tools=(WEATHER, NOW), is_required=True, is_parallel=is_parallel)
    lives = [bench.add(scheduler, Constraint(calls=rules), seed=seed) for seed in range(8)]
    scheduler.run()
    for one in lives:
        assert one.error is None
        text = bench.text(one)
        if one.code != FinishCode.EOS:
            continue  # a random model may call for ever
        calls = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
        calls = calls.split("</tool_call><tool_call>")
        assert is_parallel or len(calls) == 1
        for each in calls:
            name = each.partition("<arg_key>")[0]
            assert name in ("now", "get_weather")
            assert name == "now" or "<arg_key>city</arg_key><arg_value>" in each
    assert any(one.code == FinishCode.EOS for one in lives)
    if not is_parallel:
        assert all(one.code == FinishCode.EOS for one in lives)


def test_calls_inside_ordinary_text_are_constrained_and_the_text_is_not(bench: Bench) -> None:
    scheduler = bench.scheduler(drafts=2, liked="<tool_call>")
    rules = CallRules(tools=(NOW,), is_parallel=False)
    lives = [bench.add(scheduler, Constraint(calls=rules), seed=seed) for seed in range(6)]
    scheduler.run()
    texts = [bench.text(one) for one in lives if "<tool_call>" in bench.text(one)]
    assert texts
    assert all(text.count("<tool_call>") == 1 for text in texts)
    assert all(text.endswith("<tool_call>now</tool_call>") for text in texts)
    assert any(not text.startswith("<tool_call>") for text in texts)


def test_penalties_and_bias_choose_among_what_the_grammar_allows(bench: Bench) -> None:
    scheduler = bench.scheduler()
    choice = Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=("a", "b")))
    one = bench.add(
        scheduler,
        choice,
        logit_bias=((bench.tokenizer.encode("b", allow_control=False)[0], 100.0),),
        frequency_penalty=1.0,
    )
    scheduler.run()
    assert bench.text(one) == "b"


@pytest.mark.parametrize("drafts", [0, 2])
def test_logprobs_under_a_grammar_are_finite_numbers(bench: Bench, drafts: int) -> None:
    """They are the model's own, of before the mask."""
    scheduler = bench.scheduler(drafts=drafts)
    one = bench.add(scheduler, schema(POINT), num_logprobs=2)
    scheduler.run()
    columns = [each for each in scheduler.logprobs if each is not None]
    assert sum(len(each.sampled_logprobs) for each in columns) == len(one.outputs)
    for each in columns:
        assert np.isfinite(each.sampled_logprobs).all()
        assert np.isfinite(each.top_logprobs).all()


def test_without_end_tokens_the_text_stays_what_it_is(bench: Bench) -> None:
    scheduler = bench.scheduler()
    only = Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=("yes",)))
    one = bench.add(scheduler, only, ignore_eos=True, max_tokens=12)
    scheduler.run()
    assert one.code == FinishCode.MAX_TOKENS
    assert bench.text(one) == "yes"


def test_a_grammar_that_leaves_nothing_fails_its_row_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from services.worker.grammar.row import RowConstraint, StuckError

    scheduler = bench.scheduler()
    good = bench.add(scheduler, schema(POINT))
    other = Constraint(format=TextFormat(kind=FormatKind.REGEX, text="b+c"))
    bad = bench.add(scheduler, other)
    plain = bench.add(scheduler, None, max_tokens=9)
    original = RowConstraint.fill

    def fill(self: RowConstraint, words: Any, address: int) -> bool:
        if self._grammar.constraint is other:
            raise StuckError("made to fail")
        return original(self, words, address)

    monkeypatch.setattr(RowConstraint, "fill", fill)
    scheduler.run()
    assert bad.error is not None
    assert bad.error.reason is FailureReason.INVALID_ARGUMENT
    assert bad.error.field == "constraint"
    assert is_point(bench.text(good))
    assert len(plain.outputs) == 9


def test_an_executor_without_grammars_fails_the_row_and_names_the_field(
    tokenizer: GlmTokenizer,
) -> None:
    scheduler = MiniScheduler(make_executor())
    one = scheduler.add([1, 2], constraint=schema(POINT))
    scheduler.run()
    assert one.error is not None
    assert one.error.reason is FailureReason.FEATURE_DISABLED


JSON_TYPES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"type": "string", "maxLength": 3},
        {"enum": ["a", 1, None, True]},
        {"const": "fixed"},
    ]
)
SCHEMAS = st.recursive(
    JSON_TYPES,
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2}, inner),
        st.builds(
            lambda names, s: {
                "type": "object",
                "properties": dict.fromkeys(names, s),
                "required": names[:1],
                "additionalProperties": False,
            },
            st.lists(st.sampled_from("pqr"), min_size=1, max_size=3, unique=True),
            inner,
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=5,
)


@settings(max_examples=25, deadline=None)
@given(value=SCHEMAS, seed=st.integers(0, 2**32))
def test_any_schema_is_followed_by_a_random_model(value: Any, seed: int) -> None:
    import jsonschema_rs

    tokenizer = _tokenizer()
    bench = Bench(GrammarCompiler(lambda: EngineVocabulary(tokenizer)), tokenizer)
    scheduler = bench.scheduler(drafts=seed % 3)
    one = bench.add(scheduler, schema(value), seed=seed, max_tokens=300)
    scheduler.run()
    assert one.code == FinishCode.EOS
    jsonschema_rs.validate(value, json.loads(bench.text(one)))


def _tokenizer() -> GlmTokenizer:
    from tests.services.worker.grammar.conftest import NANO

    return GlmTokenizer.load(NANO)
