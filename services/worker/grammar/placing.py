"""Brings new rows to their place in their grammar.

A grammar that is ready and an output that is short cost microseconds. A grammar that was forgotten
meanwhile has to be compiled again, and a long output read: that happens in a thread beside the
steps, and is waited for only where the row needs its first mask.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from services.worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from services.worker.grammar.row import RowConstraint
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.plan import NewSequence
from shared.sampling import SamplingSpec

_NUM_THREADS: Final = 2
# A token is read in some 5 us.
_MAX_OUTPUTS_AT_ONCE: Final = 64


class RowPlacer:
    """Builds the constraints of rows. One thread uses it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """The threads start when they are needed first."""
        self._compiler = compiler
        self._threads: ThreadPoolExecutor | None = None

    def place(self, new: NewSequence) -> "RowConstraint | Future[RowConstraint]":
        """The constraint of a new or resumed row, or the promise of it.

        Raises:
            StuckError: The outputs do not follow the grammar.
        """
        assert new.sampling.constraint is not None
        grammar = self._compiler.find(new.sampling.constraint)
        if grammar is not None and len(new.output_token_ids) <= _MAX_OUTPUTS_AT_ONCE:
            return _placed(grammar, new)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")
        return self._threads.submit(self._compile_and_place, new)

    def _compile_and_place(self, new: NewSequence) -> RowConstraint:
        assert new.sampling.constraint is not None
        return _placed(self._compiler.compile(new.sampling.constraint), new)


def _placed(grammar: CompiledGrammar, new: NewSequence) -> RowConstraint:
    vocabulary, spec = grammar.vocabulary, new.sampling
    eos = [token for token in spec.eos_token_ids if token < vocabulary.size]
    stops = _stop_ids(spec, vocabulary)
    return RowConstraint(grammar, eos, new.output_token_ids.tolist(), stop_ids=stops)


def _stop_ids(spec: SamplingSpec, vocabulary: EngineVocabulary) -> list[int]:
    """The request's own control tokens that end its output; no text of a form has them in it."""
    assert spec.constraint is not None
    start = spec.constraint.start_after_token_id
    own = vocabulary.control_ids - {start}
    return [token for token in spec.stop_token_ids if token in own]
