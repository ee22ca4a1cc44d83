"""The constraints of all rows."""

import numpy as np
import pytest

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.row import allows
from services.worker.grammar.rows import Masks, RowConstraints, stuck
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer
from tests.services.worker.plans import make_sequence

EOS = 846


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


class Table:
    def __init__(self, compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> None:
        self.constraints = RowConstraints(6, compiler)
        self.tokenizer = tokenizer

    def admit(self, row: int, constraint: Constraint | None, outputs: str = "") -> None:
        ids = self.id_list(outputs)
        new = make_sequence(row, [1], outputs=ids, constraint=constraint, eos_token_ids=(EOS, 5000))
        self.constraints.admit(new)

    def id_list(self, text: str) -> list[int]:
        return [self.tokenizer.encode(c, allow_control=False)[0] for c in text]

    def masks(self, rows: list[int], drafts: dict[int, str] | None = None) -> Masks | None:
        given = {row: np.array(self.id_list(text)) for row, text in (drafts or {}).items()}
        if drafts is None:
            return self.constraints.masks(np.array(rows), None)
        starts = {row: rows.index(row) for row in rows}
        return self.constraints.masks(
            np.array(rows),
            lambda place: given.get(rows[place], np.empty(0, np.int64))[
                : place - starts[rows[place]]
            ],
        )

    def letters(self, masks: Masks) -> list[str]:
        words = masks.words.numpy().view(np.uint32)
        ids = {letter: self.id_list(letter)[0] for letter in "abcd"}
        return [
            "".join(letter for letter, i in ids.items() if allows(each, i))
            + ("." if allows(each, EOS) else "")
            for each in words
        ]


@pytest.fixture
def table(compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> Table:
    return Table(compiler, tokenizer)


def test_rows_without_a_constraint_cost_nothing(table: Table) -> None:
    table.admit(0, None)
    assert table.masks([0, 1]) is None
    assert table.constraints.take_cost() == (0, 0)


def test_each_constrained_row_has_its_own_mask(table: Table) -> None:
    table.admit(1, regex("a[bc]"))
    table.admit(3, regex("[cd]*"))
    masks = table.masks([0, 3, 1])
    assert masks is not None
    assert masks.places.tolist() == [1, 2]
    assert table.letters(masks) == ["cd.", "a"]
    num_masks, mask_us = table.constraints.take_cost()
    assert num_masks == 2
    assert mask_us > 0
    assert table.constraints.take_cost() == (0, 0)


def test_kept_tokens_advance_a_row_and_outputs_are_replayed(table: Table) -> None:
    table.admit(1, regex("a[bc]d"))
    table.admit(2, regex("a[bc]d"), outputs="a")
    table.constraints.note(
        np.array([1, 0, 1]), np.array([*table.id_list("a"), 9, *table.id_list("b")])
    )
    masks = table.masks([1, 2])
    assert masks is not None
    assert table.letters(masks) == ["d", "bc"]


def test_there_is_a_mask_behind_each_draft_and_the_row_stays_where_it_was(table: Table) -> None:
    table.admit(1, regex("abc?d"))
    for _ in range(2):
        masks = table.masks([1, 1, 1, 1], {1: "abc"})
        assert masks is not None
        assert masks.places.tolist() == [0, 1, 2, 3]
        assert table.letters(masks) == ["a", "b", "cd", "d"]


def test_behind_a_forbidden_draft_nothing_is_masked(table: Table) -> None:
    table.admit(1, regex("abcd"))
    table.admit(2, regex("[ab]*"))
    masks = table.masks([1, 1, 1, 1, 2], {1: "axc"})
    assert masks is not None
    assert masks.places.tolist() == [0, 1, 4]
    assert table.letters(masks) == ["a", "b", "ab."]


def test_a_row_that_is_freed_is_free_for_the_next(table: Table) -> None:
    table.admit(1, regex("a"))
    table.constraints.free(1)
    assert table.masks([1]) is None
    table.admit(1, regex("b"))
    table.constraints.reset()
    assert table.masks([1]) is None


@pytest.mark.parametrize("how", ["outputs", "constraint", "note"])
def test_a_row_whose_constraint_fails_is_stuck_and_the_others_are_not(
    table: Table, how: str
) -> None:
    table.admit(2, regex("[ab]*"))
    table.admit(
        1, regex("(" if how == "constraint" else "ab"), outputs="x" if how == "outputs" else ""
    )
    if how == "note":
        table.constraints.note(np.array([1]), np.array(table.id_list("d")))
    masks = table.masks([1, 1, 2], {1: "a"})
    assert masks is not None
    assert masks.is_stuck.tolist() == [True, True, False]
    assert masks.places.tolist() == [2]


def test_a_rank_that_does_not_sample_has_no_masks() -> None:
    constraints = RowConstraints(2)
    constraints.admit(make_sequence(0, [1], constraint=regex("a")))
    assert constraints.masks(np.array([0]), None) is None


def test_being_stuck_is_told_without_the_schema() -> None:
    assert stuck().field == "constraint"
