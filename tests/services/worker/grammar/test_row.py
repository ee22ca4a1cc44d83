"""Where a row stands in its grammar."""

import numpy as np
import pytest

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.row import Phase, RowConstraint, StuckError, Words, allows
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer

NOW = CallRules(tools=(CalledTool(name="now"),))
YES = TextFormat(kind=FormatKind.CHOICE, choices=("yes",))


class Row:
    def __init__(self, compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> None:
        self.compiler, self.tokenizer = compiler, tokenizer
        self.control = tokenizer.vocabulary.control
        self.ends = (self.control.end_of_text, self.control.user)

    def start(self, constraint: Constraint, text: str = "") -> RowConstraint:
        return RowConstraint(self.compiler.compile(constraint), self.ends, self.ids(text))

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_control=True)

    def mask(self, row: RowConstraint) -> Words:
        words = np.zeros(self.compiler.vocabulary.num_words, np.uint32)
        assert row.fill(words, words.ctypes.data)
        return words

    def allowed(self, row: RowConstraint) -> set[int]:
        words = self.mask(row)
        return {i for i in range(self.compiler.vocabulary.size) if allows(words, i)}


@pytest.fixture
def rows(compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> Row:
    return Row(compiler, tokenizer)


def test_the_ends_of_a_sequence_are_possible_only_behind_the_whole_text(rows: Row) -> None:
    row = rows.start(Constraint(format=YES))
    assert not rows.allowed(row) & set(rows.ends)
    for token in rows.ids("yes"):
        row.accept(token)
    assert row.phase is Phase.DONE
    assert rows.allowed(row) == set(rows.ends)
    row.accept(rows.ends[1])
    assert rows.allowed(row) == set(rows.ends)


def test_a_text_that_may_go_on_may_also_end(rows: Row) -> None:
    row = rows.start(Constraint(format=TextFormat(kind=FormatKind.REGEX, text="a+")), "a")
    assert rows.allowed(row) >= set(rows.ends)
    assert row.phase is Phase.INSIDE
    row.accept(rows.ends[0])
    assert row.phase is Phase.DONE


def test_without_end_tokens_of_its_own_a_row_ends_with_that_of_the_model(
    compiler: GrammarCompiler, rows: Row
) -> None:
    row = RowConstraint(compiler.compile(Constraint(format=YES)), (), rows.ids("yes"))
    assert rows.allowed(row) == {rows.control.end_of_text}


def test_while_the_model_thinks_it_may_not_end_or_call(rows: Row) -> None:
    end = rows.control.end_think
    row = rows.start(Constraint(format=YES, start_after_token_id=end), "hm")
    assert row.phase is Phase.WAITING
    missing = set(range(rows.compiler.vocabulary.size)) - rows.allowed(row)
    assert missing == {*rows.ends, rows.control.tool_call}
    row.accept(end)
    assert rows.allowed(row) == rows.allowed(rows.start(Constraint(format=YES)))


def test_a_triggered_constraint_masks_nothing_outside_calls(rows: Row) -> None:
    row = rows.start(Constraint(calls=NOW), "well")
    words = np.zeros(rows.compiler.vocabulary.num_words, np.uint32)
    assert not row.fill(words, words.ctypes.data)
    row.accept(rows.control.tool_call)
    assert row.phase is Phase.INSIDE
    assert rows.control.end_of_text not in rows.allowed(row)
    for token in rows.ids("now</tool_call>"):
        row.accept(token)
    assert row.phase is Phase.FREE


def test_behind_a_single_call_the_sequence_ends(rows: Row) -> None:
    single = CallRules(tools=NOW.tools, is_parallel=False)
    row = rows.start(Constraint(calls=single), "<tool_call>now</tool_call>")
    assert row.phase is Phase.DONE


@pytest.mark.parametrize(
    ("constraint", "before", "ahead"),
    [
        (Constraint(format=YES), "y", "es"),
        (Constraint(format=YES, start_after_token_id=None), "", "yes"),
        (Constraint(calls=NOW), "a", "<tool_call>now</tool_call>b<tool_call>now"),
        (Constraint(calls=NOW), "<tool_call>now", "</tool_call><tool_call>"),
    ],
)
def test_going_back_forgets_everything_since_across_all_borders(
    rows: Row, constraint: Constraint, before: str, ahead: str
) -> None:
    row, untouched = rows.start(constraint, before), rows.start(constraint, before)
    mark = row.mark()
    for token in rows.ids(ahead):
        row.accept(token)
    row.back_to(mark)
    assert row.phase is untouched.phase
    for token in rows.ids(ahead):
        words = [np.zeros(rows.compiler.vocabulary.num_words, np.uint32) for _ in range(2)]
        filled = [
            each.fill(mask, mask.ctypes.data)
            for each, mask in zip((row, untouched), words, strict=True)
        ]
        assert filled[0] == filled[1]
        assert np.array_equal(*words)
        row.accept(token)
        untouched.accept(token)


def test_going_back_over_the_end_of_thinking_waits_again(rows: Row) -> None:
    end = rows.control.end_think
    row = rows.start(Constraint(format=YES, start_after_token_id=end))
    mark = row.mark()
    for token in [end, *rows.ids("yes")]:
        row.accept(token)
    row.back_to(mark)
    assert row.phase is Phase.WAITING


def test_a_token_that_the_grammar_forbids_is_an_error(rows: Row) -> None:
    with pytest.raises(StuckError):
        rows.start(Constraint(format=YES), "no")


def test_masks_that_exceed_the_bounds_of_the_engine_are_an_error(rows: Row) -> None:
    hostile = TextFormat(kind=FormatKind.REGEX, text="((a|b|c){1,300}){1,300}x")
    row = rows.start(Constraint(format=hostile))

    def go_on() -> None:
        for _ in range(300):
            rows.mask(row)
            row.accept(rows.ids("a")[0])

    with pytest.raises(StuckError):
        go_on()
