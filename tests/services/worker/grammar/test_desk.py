"""Constraints are made ready once, off the loop, in bounded number."""

import asyncio
from pathlib import Path

import pytest

from services.worker.grammar.checker import OverTimeError
from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.desk import GrammarDesk
from services.worker.grammar.writer import refused
from shared.constraint import Constraint, FormatKind, PrepareOrder, TextFormat
from shared.errors import FailureReason, RequestError
from tests.services.worker.grammar.conftest import NANO


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


def order(constraint: Constraint, tenant_id: str = "") -> PrepareOrder:
    return PrepareOrder(constraint=constraint, request_id="r", tenant_id=tenant_id)


class FakeChecker:
    """Waits until it may answer, and refuses what begins with "bad", some of it only when full."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.checked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_asked = asyncio.Event()

    async def check(self, constraint: Constraint) -> None:
        assert constraint.format is not None
        self.checked.append(constraint.format.text)
        self.is_asked.set()
        await self.may_answer.wait()
        if constraint.format.text.endswith("{9}") and not self.is_full:
            raise OverTimeError(FailureReason.INVALID_ARGUMENT, "over 0.05 s")
        if constraint.format.text.startswith("bad"):
            raise refused("format", "is bad")
        if constraint.format.text.startswith("lost"):
            raise RequestError(FailureReason.UPSTREAM_LOST, "no child")

    def warm(self) -> None:
        self.checked.append("warm")

    async def close(self) -> None:
        self.checked.append("closed")


@pytest.fixture
def checker() -> FakeChecker:
    return FakeChecker()


@pytest.fixture
def full() -> FakeChecker:
    return FakeChecker(is_full=True)


@pytest.fixture
def desk(compiler: GrammarCompiler, checker: FakeChecker, full: FakeChecker) -> GrammarDesk:
    return GrammarDesk(compiler, checker, full, max_waiting=2, max_heavy=1)  # type: ignore[arg-type]  # a fake


async def prepare(desk: GrammarDesk, text: str) -> int:
    return await desk.prepare(order(regex(text)))


async def test_what_is_prepared_is_compiled_and_costs_nothing_again(
    desk: GrammarDesk, checker: FakeChecker
) -> None:
    assert await prepare(desk, "a") > 0
    assert desk.compiler.find(regex("a")) is not None
    assert await prepare(desk, "a") == 0
    assert checker.checked == ["a"]


async def test_a_refusal_is_remembered_and_a_lost_child_is_not(
    desk: GrammarDesk, checker: FakeChecker
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="is bad"):
            await prepare(desk, "bad")
    for _ in range(2):
        with pytest.raises(RequestError, match="no child"):
            await prepare(desk, "lost")
    assert checker.checked == ["bad", "lost", "lost"]


async def test_equal_constraints_that_come_together_are_checked_once(
    desk: GrammarDesk, checker: FakeChecker
) -> None:
    checker.may_answer.clear()
    both = [asyncio.ensure_future(prepare(desk, "a")) for _ in range(2)]
    await asyncio.sleep(0)
    checker.may_answer.set()
    assert all(await asyncio.gather(*both))
    assert checker.checked == ["a"]


async def test_beyond_the_bound_nobody_waits(desk: GrammarDesk, checker: FakeChecker) -> None:
    checker.may_answer.clear()
    waiting = [asyncio.ensure_future(prepare(desk, text)) for text in ("a", "b")]
    await asyncio.sleep(0.01)
    with pytest.raises(RequestError) as caught:
        await prepare(desk, "c")
    assert caught.value.reason is FailureReason.QUEUE_FULL
    checker.may_answer.set()
    await asyncio.gather(*waiting)
    assert await prepare(desk, "c") > 0


async def test_a_check_that_has_begun_comes_to_its_end_and_its_verdict_stays(
    desk: GrammarDesk, checker: FakeChecker
) -> None:
    checker.may_answer.clear()
    left = asyncio.ensure_future(prepare(desk, "bad"))
    await checker.is_asked.wait()
    left.cancel()
    await asyncio.wait({left})
    assert left.cancelled()
    behind = asyncio.ensure_future(prepare(desk, "a"))
    await asyncio.sleep(0.01)
    assert checker.checked == ["bad"], "one at a time: whose it was still has its turn"
    checker.may_answer.set()
    assert await behind > 0
    with pytest.raises(RequestError, match="is bad"):
        await prepare(desk, "bad")
    assert checker.checked == ["bad", "a"]


async def test_what_somebody_left_does_not_go_on_to_the_full_check(
    desk: GrammarDesk, checker: FakeChecker, full: FakeChecker
) -> None:
    checker.may_answer.clear()
    left = asyncio.ensure_future(prepare(desk, "a{9}"))
    await checker.is_asked.wait()
    left.cancel()
    await asyncio.wait({left})
    checker.may_answer.set()
    await prepare(desk, "b")
    assert full.checked == []


async def test_closing_waits_for_what_still_runs(desk: GrammarDesk, checker: FakeChecker) -> None:
    checker.may_answer.clear()
    left = asyncio.ensure_future(prepare(desk, "a"))
    await checker.is_asked.wait()
    left.cancel()
    asyncio.get_running_loop().call_later(0.05, checker.may_answer.set)
    await desk.close()
    assert checker.may_answer.is_set()
    assert not desk._errands


async def test_whoever_stops_waiting_makes_room(desk: GrammarDesk, checker: FakeChecker) -> None:
    checker.may_answer.clear()
    tasks = [asyncio.ensure_future(prepare(desk, text)) for text in ("a", "b")]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    checker.may_answer.set()
    assert await prepare(desk, "c") > 0


async def test_a_forgotten_grammar_is_compiled_without_another_check(
    checker: FakeChecker, compiler: GrammarCompiler
) -> None:
    small = GrammarCompiler(lambda: compiler.vocabulary, max_grammars=1)
    desk = GrammarDesk(small, checker, FakeChecker())  # type: ignore[arg-type]  # a fake
    for text in ("a", "b", "a"):
        assert await prepare(desk, text) > 0
    assert checker.checked == ["a", "b"]


async def test_warming_reads_the_tokenizer_and_starts_the_child(
    checker: FakeChecker, compiler: GrammarCompiler
) -> None:
    loaded: list[str] = []
    fresh = GrammarCompiler(lambda: loaded.append("tokenizer") or compiler.vocabulary)
    desk = GrammarDesk(fresh, checker, FakeChecker())  # type: ignore[arg-type]  # a fake
    desk.warm()
    await desk.close()
    assert loaded == ["tokenizer"]
    assert checker.checked == ["warm", "closed"]


async def test_without_a_tokenizer_no_child_is_started(
    checker: FakeChecker, tmp_path: Path
) -> None:
    compiler = GrammarCompiler.of_checkpoint(tmp_path)
    desk = GrammarDesk(compiler, checker, FakeChecker())  # type: ignore[arg-type]  # a fake
    desk.warm()
    await desk.close()
    assert checker.checked == ["closed"]


async def test_closing_ends_the_children(
    desk: GrammarDesk, checker: FakeChecker, full: FakeChecker
) -> None:
    await desk.close()
    assert checker.checked == full.checked == ["closed"]


async def test_a_heavy_one_is_checked_in_full_and_its_verdict_is_remembered(
    desk: GrammarDesk, checker: FakeChecker, full: FakeChecker
) -> None:
    assert await prepare(desk, "a{9}") > 0
    for _ in range(2):
        with pytest.raises(RequestError, match="is bad"):
            await prepare(desk, "bad{9}")
    assert checker.checked == full.checked == ["a{9}", "bad{9}"]


async def test_heavy_ones_wait_for_each_other_and_nobody_waits_for_them(
    desk: GrammarDesk, full: FakeChecker
) -> None:
    full.may_answer.clear()
    heavy = asyncio.ensure_future(prepare(desk, "a{9}"))
    await full.is_asked.wait()
    for text in ("a", "b", "c"):
        assert await prepare(desk, text) > 0
    with pytest.raises(RequestError) as caught:
        await prepare(desk, "b{9}")
    assert caught.value.reason is FailureReason.QUEUE_FULL
    assert not heavy.done()
    full.may_answer.set()
    assert await heavy > 0
    assert await prepare(desk, "b{9}") > 0


async def test_a_small_one_behind_ten_heavy_ones_has_its_turn_long_before_they_are_done() -> None:
    desk = GrammarDesk.of_checkpoint(NANO)
    text = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'
    small = Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=text))
    try:
        await prepare(desk, "warm")
        heavy = [asyncio.ensure_future(desk.prepare(order(_heavy(n)))) for n in range(10)]
        await asyncio.sleep(0)
        assert await desk.prepare(order(small)) > 0
        # Each of them takes up to a second of processor time, and those run one by one.
        assert sum(task.done() for task in heavy) < 5
        for task in heavy:
            task.cancel()
        await asyncio.gather(*heavy, return_exceptions=True)
    finally:
        await desk.close()


async def test_a_request_that_waits_has_a_span_with_the_time_of_compiling(
    desk: GrammarDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    class Span:
        def set(self, name: str, value: object) -> None:
            seen[name] = value

        def __enter__(self) -> "Span":
            return self

        def __exit__(self, *_: object) -> None:
            seen["ended"] = True

    def start_span(name: str, *, traceparent: str, attributes: dict[str, object]) -> Span:
        seen.update(attributes, name=name, traceparent=traceparent)
        return Span()

    monkeypatch.setattr("services.worker.grammar.desk.tracing.start_span", start_span)
    await desk.prepare(PrepareOrder(constraint=regex("abc"), request_id="r7", traceparent="tp"))
    assert seen.pop("compile_us") is not None
    assert seen == {
        "name": "worker.prepare",
        "traceparent": "tp",
        "request_id": "r7",
        "num_bytes": 3,
        "ended": True,
    }


def _heavy(number: int) -> Constraint:
    """What takes about a second to check."""
    names = ",".join(f'"{number}-{i}":{{"type":"string"}}' for i in range(6000))
    text = f'{{"type":"object","properties":{{{names}}}}}'
    return Constraint(format=TextFormat(kind=FormatKind.JSON_SCHEMA, text=text))
