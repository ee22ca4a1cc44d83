"""The masks of a step, on one thread or several."""

import threading
from typing import Any

import numpy as np
import pytest

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.filling import MaskFiller, RowMasks
from services.worker.grammar.row import RowConstraint, StuckError, Words, allows
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer


class Table:
    """Rows that may write one of two letters, three times."""

    def __init__(self, compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> None:
        text = TextFormat(kind=FormatKind.REGEX, text="[ab]{3}")
        self.grammar = compiler.compile(Constraint(format=text))
        self.num_words = compiler.vocabulary.num_words
        self.a, self.b, self.c = (tokenizer.encode(x, allow_control=False)[0] for x in "abc")

    def job(self, *drafts: int) -> RowMasks:
        words = np.zeros((1 + len(drafts), self.num_words), np.uint32)
        constraint = RowConstraint(self.grammar, (), ())
        return RowMasks(constraint, words, words.ctypes.data, list(drafts))

    def letters(self, words: Words) -> set[int]:
        return {each for each in (self.a, self.b, self.c) if allows(words, each)}


@pytest.fixture
def table(compiler: GrammarCompiler, tokenizer: GlmTokenizer) -> Table:
    return Table(compiler, tokenizer)


def test_each_draft_has_a_mask_behind_it_and_the_row_stays_where_it_was(table: Table) -> None:
    job = table.job(table.a, table.b, table.a)
    MaskFiller().fill([job])
    assert job.is_masked == [True] * 4
    assert [table.letters(words) for words in job.words] == [{table.a, table.b}] * 3 + [set()]
    again = table.job()
    again.constraint = job.constraint
    MaskFiller().fill([again])
    assert table.letters(again.words[0]) == {table.a, table.b}


def test_behind_a_draft_that_is_not_allowed_nothing_is_masked(table: Table) -> None:
    job = table.job(table.a, table.c, table.a)
    MaskFiller().fill([job])
    assert job.is_masked == [True, True, False, False]
    assert job.error is None


def _noting(monkeypatch: pytest.MonkeyPatch, names: set[str], **more: Any) -> None:
    original = RowConstraint.fill

    def fill(self: RowConstraint, words: Words, address: int) -> bool:
        names.add(threading.current_thread().name)
        if self is more.get("failing"):
            raise StuckError("made to fail")
        return original(self, words, address)

    monkeypatch.setattr(RowConstraint, "fill", fill)


def test_masks_that_took_long_are_made_by_several_threads_the_next_time(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    _noting(monkeypatch, names)
    filler = MaskFiller(num_threads=2)
    plain = [table.job(table.a) for _ in range(40)]
    filler.fill(plain)
    assert names == {threading.current_thread().name}
    names.clear()
    filler.is_long = True
    jobs = [table.job(table.a) for _ in range(40)]
    filler.fill(jobs)
    assert all(name.startswith("masks") for name in names)
    for one, other in zip(plain, jobs, strict=True):
        assert one.is_masked == other.is_masked
        assert (one.words == other.words).all()


def test_without_processors_to_spare_no_thread_is_started(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()
    _noting(monkeypatch, names)
    filler = MaskFiller(num_threads=1)
    filler.is_long = True
    filler.fill([table.job(), table.job()])
    assert names == {threading.current_thread().name}


@pytest.mark.parametrize("is_long", [False, True])
def test_a_row_that_fails_has_no_mask_and_the_others_have_theirs(
    table: Table, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    jobs = [table.job(table.a) for _ in range(4)]
    _noting(monkeypatch, set(), failing=jobs[1].constraint)
    filler = MaskFiller(num_threads=2)
    filler.is_long = is_long
    filler.fill(jobs)
    assert [job.error is not None for job in jobs] == [False, True, False, False]
    assert jobs[1].is_masked == [False, False]
    assert jobs[2].is_masked == [True, True]
