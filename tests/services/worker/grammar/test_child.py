"""What the checking process says, without the process."""

import io
import resource
import signal

import msgspec
import pytest

from services.worker.grammar import child
from services.worker.grammar.child import LENGTH, Verdict, bound_memory, serve
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import Constraint, FormatKind, TextFormat


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


def answers(vocabulary: EngineVocabulary, *asked: Constraint) -> list[Verdict]:
    source, target = io.BytesIO(), io.BytesIO()
    for constraint in asked:
        data = msgspec.json.encode(constraint)
        source.write(LENGTH.pack(len(data)) + data)
    source.seek(0)
    serve(vocabulary, source, target, cpu_s=30.0)
    data, found = target.getvalue(), []
    while data:
        (size,) = LENGTH.unpack_from(data)
        found.append(msgspec.json.decode(data[4 : 4 + size], type=Verdict))
        data = data[4 + size :]
    return found


def test_each_constraint_gets_one_verdict_in_order(vocabulary: EngineVocabulary) -> None:
    good, bad, again = answers(vocabulary, regex("a"), regex("("), regex("b"))
    assert good == again == Verdict()
    assert "unclosed" in bad.message
    assert bad.field == "constraint.format"


def test_the_clock_runs_during_a_check_only(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        child, "check", lambda *_: seen.append(signal.getitimer(signal.ITIMER_PROF)[0])
    )
    answers(vocabulary, regex("a"))
    assert 0 < seen[0] <= 30.1  # the kernel rounds up to its ticks
    assert signal.getitimer(signal.ITIMER_PROF)[0] == 0


def test_memory_that_runs_out_is_a_verdict(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhaust(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(child, "check", exhaust)
    assert "memory" in answers(vocabulary, regex("a"))[0].message


@pytest.mark.parametrize("error", [TypeError, RecursionError, BaseException])
def test_whatever_goes_wrong_is_a_verdict_that_says_what_and_the_next_one_is_checked(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def check(constraint: Constraint, _: EngineVocabulary) -> None:
        if constraint == regex("wrong"):
            raise error("x" * 1000)

    monkeypatch.setattr(child, "check", check)
    first, second = answers(vocabulary, regex("wrong"), regex("a"))
    assert f"cannot be read ({error.__name__}: xxx" in first.message
    assert len(first.message) <= 300
    assert second == Verdict()


def test_the_bound_of_memory_lies_above_what_the_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: told.append((kind, pair)))
    bound_memory(1 << 20)
    kind, (soft, hard) = told[0]
    assert kind == resource.RLIMIT_AS
    assert soft == hard > 1 << 24
