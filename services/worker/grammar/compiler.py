"""From a constraint to something that can be matched, with a bounded cache.

Compiling drops the interpreter lock, and the bounds of the engine keep it short; hostile
constraints have been refused before (`checker`). Used by the thread of the steps and by those that
prepare.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLMatcher

from services.worker.grammar.translate import is_triggered, translate
from services.worker.grammar.vocabulary import EngineVocabulary
from services.worker.grammar.writer import refused
from shared.constraint import Constraint
from shared.glm.tokenizer import GlmTokenizer

# A compiled grammar takes some 100 KiB to a few MiB.
_MAX_GRAMMARS: Final = 64
_MAX_REASON_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
        self._known: OrderedDict[Constraint, CompiledGrammar] = OrderedDict()
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

    def known(self, constraint: Constraint) -> bool:
        """Whether `compile` has it ready."""
        with self._lock:
            return constraint in self._known

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint.

        Raises:
            RequestError: It has none, and why.
        """
        with self._lock:
            found = self._known.get(constraint)
            if found is not None:
                self._known.move_to_end(constraint)
                return found
        compiled = compile_anew(constraint, self.vocabulary)
        with self._lock:
            self._known[constraint] = compiled
            while len(self._known) > self._max_grammars:
                self._known.popitem(last=False)
        return compiled


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
