"""What the checking process says, without the process."""

import io
import os
import resource
import signal
from collections.abc import Callable

import msgspec
import pytest

from services.worker.grammar import child
from services.worker.grammar.child import LENGTH, Bounds, Verdict, bound_memory, serve, verdict_of
from services.worker.grammar.vocabulary import EngineVocabulary
from shared.constraint import Constraint, FormatKind, TextFormat


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


def answers(
    vocabulary: EngineVocabulary, *asked: Constraint, cpu_s: float = 30.0
) -> list[Verdict | None]:
    source, target = io.BytesIO(), io.BytesIO()
    for constraint in asked:
        data = msgspec.json.encode(constraint)
        source.write(LENGTH.pack(len(data)) + data)
    source.seek(0)
    serve(vocabulary, source, target, Bounds(cpu_s=cpu_s, memory_bytes=1 << 30))
    data, found = target.getvalue(), list[Verdict | None]()
    while data:
        (size,) = LENGTH.unpack_from(data)
        told = msgspec.json.decode(data[4 : 4 + size], type=Verdict) if size else None
        found.append(told)
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
    verdict_of(vocabulary, msgspec.json.encode(regex("a")), 30.0)
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


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), -signal.SIGSEGV),
        (os.abort, -signal.SIGABRT),
        (lambda: os._exit(3), 3),
    ],
)
def test_how_a_check_ended_its_process_is_told_and_the_next_one_is_checked(
    vocabulary: EngineVocabulary,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[], None],
    code: int,
) -> None:
    monkeypatch.setattr(child, "check", lambda given, _: given == regex("end") and end())
    assert answers(vocabulary, regex("end"), regex("a")) == [Verdict(exit_code=code), Verdict()]


def test_a_check_beyond_its_time_ends_alone_and_says_meanwhile_that_it_gets_on(
    vocabulary: EngineVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spin(given: Constraint, _: EngineVocabulary) -> None:
        while given == regex("spin"):
            pass

    monkeypatch.setattr(child, "check", spin)
    monkeypatch.setattr(child, "_BEAT_S", 0.05)
    first, *beats_and_last = answers(vocabulary, regex("a"), regex("spin"), cpu_s=1.5)
    *beats, last = beats_and_last
    assert first == Verdict()
    assert len(beats) > 1
    assert set(beats) == {None}
    assert last == Verdict(exit_code=-signal.SIGPROF)


def test_the_bound_of_memory_lies_above_what_the_process_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: told.append((kind, pair)))
    bound_memory(1 << 20)
    kind, (soft, hard) = told[0]
    assert kind == resource.RLIMIT_AS
    assert soft == hard > 1 << 24
