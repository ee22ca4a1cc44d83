"""From a constraint to something that can be matched, compiled once while somebody needs it.

A grammar is known as long as a row holds it, and as long as it is among the latest. Compiling drops
the interpreter lock, and the bounds of the engine keep it short; hostile constraints have been
refused before (`checker`). Used by the thread of the steps and by those that prepare.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher

from services.worker.grammar.translate import is_triggered, translate
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.grammar.writer import refused
from shared.constraint import Constraint
from shared.glm.tokenizer import GlmTokenizer

# Beside those of rows. A compiled grammar takes 150 to 300 KiB, a very large one a few MiB.
_MAX_GRAMMARS: Final = 256
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class CompiledGrammar:
    """A constraint, ready. Never advanced itself: each row has a copy."""

    vocabulary: EngineVocabulary
    constraint: Constraint
    start: LLMatcher

    @property
    def is_triggered(self) -> bool:
        """Whether it holds inside calls alone."""
        return is_triggered(self.constraint)

    def matcher(self) -> LLMatcher:
        """A matcher at the start; costs microseconds."""
        return self.start.deep_copy()


class GrammarCompiler:
    """Compiles once and remembers the latest. Usable from several threads."""

    def __init__(
        self, load: Callable[[], EngineVocabulary], max_grammars: int = _MAX_GRAMMARS
    ) -> None:
        """`load` is called when the first constraint comes."""
        self._load = load
        self._max_grammars = max_grammars
        self._vocabulary: EngineVocabulary | None = None
        self._latest: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
        self._alive: WeakValueDictionary[Constraint, CompiledGrammar] = WeakValueDictionary()
        self._lock = threading.Lock()
        self._loading = threading.Lock()

    @classmethod
    def of_checkpoint(cls, path: Path) -> "GrammarCompiler":
        """For the tokenizer of a checkpoint."""
        return cls(lambda: EngineVocabulary(GlmTokenizer.load(path)))

    @property
    def vocabulary(self) -> EngineVocabulary:
        """The tokenizer; read when it is asked for first."""
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def load(self) -> None:
        """Read the tokenizer now."""
        _ = self.vocabulary

    def find(self, constraint: Constraint) -> CompiledGrammar | None:
        """The grammar if it is ready; it counts as used."""
        with self._lock:
            found = self._alive.get(constraint)
            if found is not None:
                self._keep(found)
            return found

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint.

        Raises:
            RequestError: It has none, and why.
        """
        found = self.find(constraint)
        if found is not None:
            return found
        compiled = compile_anew(constraint, self.vocabulary)
        with self._lock:
            # Somebody else may have been faster: rows of equal constraints share a grammar.
            compiled = self._alive.setdefault(constraint, compiled)
            self._keep(compiled)
        return compiled

    def _keep(self, grammar: CompiledGrammar) -> None:
        self._latest[grammar.constraint] = grammar
        self._latest.move_to_end(grammar.constraint)
        while len(self._latest) > self._max_grammars:
            self._latest.popitem(last=False)


def compile_anew(constraint: Constraint, vocabulary: EngineVocabulary) -> CompiledGrammar:
    """Translate and compile.

    Raises:
        RequestError: The constraint has no grammar, and why.
    """
    matcher = vocabulary.matcher(translate(constraint, vocabulary))
    first = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    eos = vocabulary.control.end_of_text
    is_empty = not (np.flatnonzero(np.unpackbits(first, bitorder="little")) != eos).any()
    if is_empty and (not matcher.is_error() or "NoExtension" in matcher.get_error()):
        raise refused(_part_at_fault(constraint), "no text fits it")
    if matcher.is_error():
        raise refused(_part_at_fault(constraint), reason_of(matcher))
    return CompiledGrammar(vocabulary=vocabulary, constraint=constraint, start=matcher)


def reason_of(matcher: LLMatcher) -> str:
    """What the engine says is wrong, in one line."""
    told_by_engine = matcher.get_error().replace("<non-verbose/>", "")
    lines = [line.strip() for line in told_by_engine.splitlines() if line.strip()]
    # A list of lines points at a place in our own rules, which tells nobody anything.
    told = " ".join(line for line in lines if not line[0].isdigit() or "|" not in line)
    if "regex parse error" in told:
        told = "not an expression: " + told.rpartition("error: ")[2]
    return told.rstrip(" ^")[:_MAX_REASON_CHARS] or "the grammar engine refused it"


def _part_at_fault(constraint: Constraint) -> str:
    return "calls" if constraint.format is None else "format"
