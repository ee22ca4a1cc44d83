"""The child that checks constraints: good, bad and hostile ones."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.worker.grammar.checker import CheckLimits, GrammarChecker, OverTimeError
from services.worker.grammar.child import Verdict
from shared.constraint import Constraint, FormatKind, TextFormat
from shared.errors import FailureReason, RequestError
from tests.services.worker.grammar.conftest import NANO

GOOD = Constraint(format=TextFormat(kind=FormatKind.CHOICE, choices=("a",)))
# Every property may follow every other: some 20 million states.
HOSTILE = Constraint(
    format=TextFormat(
        kind=FormatKind.GRAMMAR,
        text="root ::= " + "(" * 600 + '"a"' + ")?" * 600,
    )
)


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


@pytest_asyncio.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    found = GrammarChecker(NANO)
    yield found
    await found.close()


async def test_good_ones_pass_and_bad_ones_are_refused_with_the_reason(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD)
    with pytest.raises(RequestError, match="unclosed group") as caught:
        await checker.check(regex("("))
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT
    await checker.check(GOOD)


async def test_too_much_processor_time_is_the_end_of_the_child_alone() -> None:
    checker = GrammarChecker(NANO, CheckLimits(cpu_s=0.000001))
    try:
        with pytest.raises(RequestError, match="processor time"):
            await checker.check(_slow())
    finally:
        await checker.close()


async def test_too_much_memory_is_the_end_of_the_child_alone() -> None:
    checker = GrammarChecker(NANO, CheckLimits(memory_bytes=1 << 20))
    try:
        with pytest.raises(RequestError, match="memory"):
            await checker.check(_slow())
    finally:
        await checker.close()


async def test_a_child_that_does_not_answer_is_killed() -> None:
    checker = GrammarChecker(NANO, CheckLimits(wall_s=0.0))
    with pytest.raises(RequestError, match="had no time") as caught:
        await checker.check(GOOD)
    assert caught.value.outcome.is_retryable
    await checker.close()


async def test_a_child_that_hangs_is_replaced_and_fails_one_check_alone() -> None:
    checker = GrammarChecker(NANO)
    try:
        await checker.check(GOOD)
        first = checker._child
        assert first is not None
        checker._limits = CheckLimits(wall_s=0.5)
        os.kill(first.pid, signal.SIGSTOP)
        with pytest.raises(RequestError, match="had no time") as caught:
            await checker.check(GOOD)
        assert caught.value.outcome.is_retryable
        assert first.returncode is not None
        checker._limits = CheckLimits()  # a machine that is busy may need more than half a second
        await checker.check(GOOD)
    finally:
        await checker.close()


async def test_a_child_that_is_killed_during_a_check_is_missed_by_nobody(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD)
    child = checker._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    asked = asyncio.ensure_future(checker.check(GOOD))
    await asyncio.sleep(0)
    os.kill(child.pid, signal.SIGKILL)
    await asked
    assert child.returncode == -signal.SIGKILL


async def test_two_children_that_are_killed_during_a_check_are_not_held_against_the_constraint(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []

    async def ask(child: Process, *_: object) -> Verdict:
        lost.append(child.pid)
        child.kill()
        raise EOFError

    with monkeypatch.context() as patch:
        patch.setattr("services.worker.grammar.checker._ask", ask)
        with pytest.raises(RequestError, match="was lost") as caught:
            await checker.check(GOOD)
    assert caught.value.outcome.is_retryable
    assert len(set(lost)) == 2
    await checker.check(GOOD)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGABRT, "too much memory"), (3, "code 3")],
)
async def test_a_check_that_ends_its_process_is_refused_with_how_it_ended(
    checker: GrammarChecker, code: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(*_: object) -> Verdict:
        return Verdict(exit_code=code)

    monkeypatch.setattr("services.worker.grammar.checker._ask", ask)
    with pytest.raises(RequestError, match=reason) as caught:
        await checker.check(GOOD)
    assert caught.value.reason is FailureReason.INVALID_ARGUMENT


async def test_a_warm_checker_has_its_child_before_the_first_check(checker: GrammarChecker) -> None:
    checker.warm()
    checker.warm()
    assert checker._starting is not None
    child = await checker._starting
    await checker.check(GOOD)
    assert checker._child is child


async def test_a_check_that_takes_too_long_leaves_the_child_to_the_next_one() -> None:
    checker = GrammarChecker(NANO, CheckLimits(cpu_s=0.3))
    try:
        await checker.check(GOOD)
        first = checker._child
        with pytest.raises(OverTimeError, match=r"over 0\.3 s of processor time"):
            await checker.check(_slow())
        await checker.check(GOOD)
        assert checker._child is first
    finally:
        await checker.close()


async def test_a_check_that_gets_on_slowly_is_not_given_up() -> None:
    checker = GrammarChecker(NANO, CheckLimits(cpu_s=1.6, wall_s=1.4))
    try:
        # It takes more than the clock allows to a check that stands still.
        with pytest.raises(OverTimeError):
            await checker.check(_slow(12_000))
    finally:
        await checker.close()


async def test_whoever_gives_up_a_check_leaves_the_child_and_no_answer_to_the_next_one(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD)
    first = checker._child
    for _ in range(3):
        asked = asyncio.ensure_future(checker.check(regex("(")))
        await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await checker.check(GOOD)
    with pytest.raises(RequestError, match="unclosed"):
        await checker.check(regex("("))
    assert checker._child is first


async def test_a_child_that_hung_in_a_check_that_was_given_up_is_replaced_before_the_next_one() -> (
    None
):
    checker = GrammarChecker(NANO)
    try:
        await checker.check(GOOD)
        first = checker._child
        assert first is not None
        checker._limits = CheckLimits(wall_s=0.5)
        os.kill(first.pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(checker.check(GOOD))
        await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        checker._limits = CheckLimits()
        await checker.check(GOOD)
        assert checker._child is not first
    finally:
        await checker.close()


async def test_a_checker_closes_while_a_check_that_was_given_up_runs(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD)
    asked = asyncio.ensure_future(checker.check(_slow(12_000)))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await checker.close()
    assert checker._left is not None
    assert checker._left.done()


async def test_whoever_gives_up_waiting_for_a_child_does_not_end_it(
    checker: GrammarChecker,
) -> None:
    asked = asyncio.ensure_future(checker.check(GOOD))
    await asyncio.sleep(0)
    starting = checker._starting
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert starting is not None
    assert (await starting).returncode is None


async def test_a_closed_checker_starts_nothing(checker: GrammarChecker) -> None:
    await checker.close()
    checker.warm()
    assert checker._starting is None
    with pytest.raises(RequestError, match="was lost"):
        await checker.check(GOOD)


async def test_a_child_that_died_is_started_again(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    assert checker._child is not None
    first = checker._child
    first.kill()
    await first.wait()
    await checker.check(GOOD)
    assert checker._child is not first


def _slow(num_properties: int = 3000) -> Constraint:
    names = ",".join(f'"k{i}":{{"type":"string"}}' for i in range(num_properties))
    text = f'{{"type":"object","properties":{{{names}}}}}'
    return Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=text))


HOSTILE_ONES = [
    regex("((a|b|c){1,300}){1,300}x"),
    regex("(a?){5000}" * 20),
    regex("(.*a){200}"),
    _slow(),
    Constraint(
        format=TextFormat(
            kind=FormatKind.JSON_SCHEMA,
            text='{"allOf":[' + ",".join(['{"pattern":"^(a|aa)+$"}'] * 500) + "]}",
        )
    ),
    HOSTILE,
    Constraint(format=TextFormat(kind=FormatKind.GRAMMAR, text="start: start start | start?")),
    Constraint(
        format=TextFormat(
            kind=FormatKind.JSON_SCHEMA,
            text='{"$defs":{'
            + ",".join(
                f'"d{i}":{{"anyOf":[{{"$ref":"#/$defs/d{i + 1}"}},'
                f'{{"type":"array","items":{{"$ref":"#/$defs/d{i + 1}"}}}}]}}'
                for i in range(200)
            )
            + ',"d200":{"type":"null"}},"$ref":"#/$defs/d0"}',
        )
    ),
]


def schema(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=text))


REFUSED = {
    "objects in objects": schema('{"properties":{"a":' * 20_000 + "{}" + "}}" * 20_000),
    "arrays in arrays": schema('{"items":' * 900 + "{}" + "}" * 900),
    "an expression of all words": regex("(a|aa|aaa|[a-z]{1,50}){1,400}b"),
    "an expression of all letters": regex(r"(\p{L}{1,100}\s*){1,100}"),
    "a reference to itself": schema('{"$ref":"#"}'),
    "references in a circle": schema(
        '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'
    ),
    "10 MB": schema('{"description":"' + "x" * 10_000_000 + '"}'),
}
LARGE_BUT_USABLE = {
    "many values": schema('{"enum":[' + ",".join(f'"value {i}"' for i in range(2000)) + "]}"),
    "a large count": regex("(ab{1,1000}c?){1,1000}"),
    "a long text": schema('{"type":"string","minLength":100000,"maxLength":1000000}'),
    "many items": schema('{"type":"array","items":{},"minItems":5000,"maxItems":100000}'),
    "a tree": schema(
        '{"$defs":{"n":{"type":"object","properties":{"l":{"$ref":"#/$defs/n"},'
        '"r":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}'
    ),
}


async def test_what_no_grammar_can_hold_is_refused_with_a_reason_and_the_child_lives(
    checker: GrammarChecker,
) -> None:
    await checker.check(GOOD)
    first = checker._child
    for name, constraint in REFUSED.items():
        with pytest.raises(RequestError) as caught:
            await checker.check(constraint)
        assert caught.value.reason is FailureReason.INVALID_ARGUMENT, name
        assert len(caught.value.message) < 400, name
    assert checker._child is first


async def test_what_is_large_and_bounded_can_be_used(checker: GrammarChecker) -> None:
    for constraint in LARGE_BUT_USABLE.values():
        await checker.check(constraint)


async def test_hostile_ones_are_decided_in_bounded_time_and_harm_nobody(
    checker: GrammarChecker,
) -> None:
    num_refused = 0
    for constraint in HOSTILE_ONES:
        try:
            await checker.check(constraint)
        except RequestError as error:
            num_refused += error.reason is FailureReason.INVALID_ARGUMENT
    assert num_refused >= 3
    await checker.check(GOOD)


async def test_a_pipe_that_closed_a_moment_ago_is_left_for_another_child(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(GOOD)
    child = checker._child
    assert child is not None
    assert child.stdin is not None

    def closed(_data: bytes) -> None:
        os.kill(child.pid, signal.SIGKILL)
        raise RuntimeError("unable to perform operation; the handler is closed")  # as uvloop does

    monkeypatch.setattr(child.stdin, "write", closed)
    await checker.check(regex("b"))
    assert child.returncode == -signal.SIGKILL
    assert checker._child is not child
