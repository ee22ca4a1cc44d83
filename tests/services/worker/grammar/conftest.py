"""A compiler over the tokenizer of the embedded checkpoint, and ways to ask a grammar."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.worker.grammar.compiler import GrammarCompiler, compile_anew
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import CalledTool, CallRules, Constraint, FormatKind, TextFormat
from shared.glm.tokenizer import GlmTokenizer

NANO = Path("models/glm-nano")


@pytest.fixture(scope="session")
def tokenizer() -> GlmTokenizer:
    return GlmTokenizer.load(NANO)


@pytest.fixture(scope="session")
def vocabulary(tokenizer: GlmTokenizer) -> EngineVocabulary:
    return EngineVocabulary(tokenizer)


@pytest.fixture
def compiler(vocabulary: EngineVocabulary) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary)


class Reader:
    """Reads texts with the grammar of a constraint."""

    def __init__(self, vocabulary: EngineVocabulary, tokenizer: GlmTokenizer) -> None:
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Control tokens where they are spelled."""
        return self.tokenizer.encode(text, allow_control=True)

    def reads(self, constraint: Constraint, text: str) -> bool:
        """Whether the text is complete."""
        matcher = compile_anew(constraint, self.vocabulary).matcher()
        ids = self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def begins(self, constraint: Constraint, text: str) -> bool:
        """Whether a text may begin so."""
        matcher = compile_anew(constraint, self.vocabulary).matcher()
        ids = self.ids(text)
        return matcher.try_consume_tokens(ids) == len(ids)

    def next_tokens(self, constraint: Constraint, text: str) -> set[str]:
        """What may follow a text."""
        matcher = compile_anew(constraint, self.vocabulary).matcher()
        assert matcher.consume_tokens(self.ids(text))
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        strings = self.tokenizer.vocabulary.token_strings
        return {strings[i] for i in np.flatnonzero(bits)}


@pytest.fixture(scope="session")
def reader(vocabulary: EngineVocabulary, tokenizer: GlmTokenizer) -> Reader:
    return Reader(vocabulary, tokenizer)


@pytest.fixture(scope="session")
def make_format() -> Callable[..., Constraint]:
    def make(kind: FormatKind, text: str = "", **more: object) -> Constraint:
        return Constraint(format=TextFormat(kind=kind, text=text, **more))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_calls() -> Callable[..., Constraint]:
    def make(*tools: CalledTool, **more: bool) -> Constraint:
        return Constraint(calls=CallRules(tools=tools, **{"is_required": True, **more}))

    return make


@pytest.fixture(scope="session")
def call() -> Callable[..., str]:
    """A call in the model's own form."""

    def make(name: str, /, **arguments: str) -> str:
        parts = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}{parts}</tool_call>"

    return make
