"""Rows come to their place in their grammar, and no step compiles anything."""

import threading
from concurrent.futures import Future

import numpy as np
import pytest

from services.worker.grammar import compiler as compiling
from services.worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from services.worker.grammar.placing import RowPlacer
from services.worker.grammar.row import Phase, RowConstraint, StuckError, allows
from services.worker.grammar.rows import RowConstraints
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.plan import NewSequence
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer
from tests.services.worker.plans import make_sequence

EOS = 846


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


def sequence(
    constraint: Constraint, outputs: list[int] | None = None, **more: object
) -> NewSequence:
    given = {"constraint": constraint, "eos_token_ids": (EOS,), **more}
    return make_sequence(0, [1], outputs=outputs or [], **given)  # type: ignore[arg-type]


def test_a_grammar_that_is_ready_places_its_row_at_once(compiler: GrammarCompiler) -> None:
    compiler.compile(regex("a"))
    assert isinstance(RowPlacer(compiler).place(sequence(regex("a"))), RowConstraint)


def test_outputs_that_do_not_follow_the_grammar_are_an_error_at_once_or_later(
    compiler: GrammarCompiler, tokenizer: GlmTokenizer
) -> None:
    wrong = tokenizer.encode("b", allow_control=False)
    later = RowPlacer(compiler).place(sequence(regex("a"), wrong))
    assert isinstance(later, Future)
    with pytest.raises(StuckError):
        later.result()
    with pytest.raises(StuckError):
        RowPlacer(compiler).place(sequence(regex("a"), wrong))


def test_a_long_output_is_read_beside_the_steps(
    compiler: GrammarCompiler, tokenizer: GlmTokenizer
) -> None:
    compiler.compile(regex("a+"))
    outputs = tokenizer.encode("a", allow_control=False) * 1000
    later = RowPlacer(compiler).place(sequence(regex("a+"), outputs))
    assert isinstance(later, Future)
    assert later.result().phase is Phase.INSIDE


class Gate:
    """Holds compiling up until it is opened, and notes which thread compiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.threads: list[str] = []
        self._original = compiling.compile_anew
        monkeypatch.setattr(compiling, "compile_anew", self._compile)

    def _compile(self, constraint: Constraint, vocabulary: EngineVocabulary) -> CompiledGrammar:
        self.threads.append(threading.current_thread().name)
        assert self.open.wait(10)
        return self._original(constraint, vocabulary)


def test_a_forgotten_grammar_is_compiled_beside_the_step_that_admits_its_row(
    compiler: GrammarCompiler, tokenizer: GlmTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    rows = RowConstraints(2, compiler)
    outputs = tokenizer.encode("a", allow_control=False)
    rows.admit(sequence(regex("ab"), outputs))  # returns though nothing is compiled yet
    gate.open.set()
    masks = rows.masks(np.array([0]), None)
    assert masks is not None
    assert allows(
        masks.words[0].numpy().view(np.uint32), tokenizer.encode("b", allow_control=False)[0]
    )
    assert len(gate.threads) == 1
    assert gate.threads[0].startswith("grammars")


def test_a_row_that_is_freed_before_its_grammar_comes_leaves_nothing(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    rows = RowConstraints(2, compiler)
    rows.admit(sequence(regex("ab")))
    rows.free(0)
    gate.open.set()
    assert rows.masks(np.array([0]), None) is None


def test_a_grammar_that_cannot_be_compiled_any_more_makes_its_row_stuck(
    compiler: GrammarCompiler,
) -> None:
    rows = RowConstraints(2, compiler)
    rows.admit(sequence(regex("(")))
    masks = rows.masks(np.array([0]), None)
    assert masks is not None
    assert masks.is_stuck.tolist() == [True]


def test_a_grammar_in_use_is_not_compiled_again_for_another_row(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, max_grammars=1)
    compiler.compile(regex("a"))
    rows = RowConstraints(2, compiler)
    rows.admit(sequence(regex("a")))
    for text in "bcd":
        compiler.compile(regex(text))
    Gate(monkeypatch)  # closed: whoever compiles now fails
    assert isinstance(RowPlacer(compiler).place(sequence(regex("a"))), RowConstraint)


def test_stop_ids_that_no_text_has_may_stand_where_the_text_is_complete(
    compiler: GrammarCompiler, tokenizer: GlmTokenizer
) -> None:
    control = tokenizer.vocabulary.control
    letter = tokenizer.encode("a", allow_control=False)[0]
    thinking = Constraint(format=regex("a").format, start_after_token_id=control.end_think)
    compiler.compile(thinking)
    stops = (control.user, control.end_think, letter)
    new = sequence(thinking, [control.end_think], stop_token_ids=stops)
    row = RowPlacer(compiler).place(new)
    assert isinstance(row, RowConstraint)
    assert row.end_ids == {EOS, control.user}
    assert row.phase is Phase.INSIDE
    words = np.zeros(compiler.vocabulary.num_words, np.uint32)
    row.fill(words, words.ctypes.data)
    assert not allows(words, control.user)
    row.accept(letter)
    row.fill(words, words.ctypes.data)
    assert allows(words, control.user)
