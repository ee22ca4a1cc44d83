"""Compiled grammars and their cache."""

import pytest

from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.errors import RequestError


def choice(*texts: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=texts))


def test_equal_constraints_are_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile(choice("a"))
    assert compiler.compile(choice("a")) is first
    assert compiler.compile(choice("b")) is not first
    assert compiler.find(choice("a")) is first


def test_the_cache_is_bounded_and_forgets_what_was_used_longest_ago(
    vocabulary: EngineVocabulary,
) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, max_grammars=2)
    for text in ("a", "b", "a", "c"):
        compiler.compile(choice(text))
    found = [compiler.find(choice(text)) is not None for text in "abc"]
    assert found == [True, False, True]


def test_what_somebody_holds_is_not_forgotten(vocabulary: EngineVocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary, max_grammars=1)
    held = compiler.compile(choice("a"))
    for text in "bcd":
        compiler.compile(choice(text))
    assert compiler.find(choice("a")) is held
    assert compiler.find(choice("b")) is None
    del held
    compiler.compile(choice("e"))
    assert compiler.find(choice("a")) is None


def test_the_tokenizer_is_read_once_and_only_when_it_is_needed(
    vocabulary: EngineVocabulary,
) -> None:
    calls = []
    compiler = GrammarCompiler(lambda: calls.append(1) or vocabulary)
    assert not calls
    compiler.compile(choice("a"))
    compiler.compile(choice("b"))
    assert len(calls) == 1


def test_rows_do_not_share_where_they_stand(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(choice("ab", "cd"))
    one, other = grammar.matcher(), grammar.matcher()
    assert one.consume_tokens(compiler.vocabulary._tokenizer.encode("ab", allow_control=False))
    assert one.is_accepting()
    assert not other.is_accepting()


def test_what_is_refused_is_not_kept_and_says_why_in_one_line(compiler: GrammarCompiler) -> None:
    bad = Constraint(format=TextFormat(kind=FormatKind.REGEX, text="(a"))
    with pytest.raises(RequestError, match="unclosed group") as caught:
        compiler.compile(bad)
    assert "\n" not in caught.value.message
    assert compiler.find(bad) is None
