"""The child that checks constraints: good, bad and hostile ones."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.worker.grammar.checker import CheckLimits, GrammarChecker
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
    with pytest.raises(RequestError, match="too busy") as caught:
        await checker.check(GOOD)
    assert caught.value.outcome.is_retryable
    assert checker._child is None


async def test_a_child_that_died_is_started_again(checker: GrammarChecker) -> None:
    await checker.check(GOOD)
    assert checker._child is not None
    first = checker._child
    first.kill()
    await first.wait()
    await checker.check(GOOD)
    assert checker._child is not first


def _slow() -> Constraint:
    names = ",".join(f'"k{i}":{{"type":"string"}}' for i in range(3000))
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
