"""Constraints are got ready before the core knows of their requests."""

import asyncio
from typing import Any

import pytest

from services.scheduler import preparing
from services.scheduler.engine import Engine
from services.scheduler.messages import Delivery, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import WorkerLostError
from services.scheduler.preparing import MAX_PREPARING, Preparations, aborted
from shared.constraint import Constraint, FormatKind, PrepareOrder, TextFormat
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.sampling import SamplingSpec
from tests.services.scheduler.builders import entry, submission
from tests.services.scheduler.engine_bench import Bench, Link, Session, until


def regex(text: str) -> Constraint:
    return Constraint(format=TextFormat(kind=FormatKind.REGEX, text=text))


def order(request_id: str, text: str) -> PrepareOrder:
    return PrepareOrder(constraint=regex(text), request_id=request_id)


class Worker:
    """Gets constraints ready when it may; refuses "bad", is lost at "lost"."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.tenants: list[str] = []
        self.num_waiting = 0
        self.full_of = ""
        self.gate = asyncio.Event()
        self.gate.set()

    async def prepare(self, order: PrepareOrder) -> int:
        constraint = order.constraint
        assert constraint.format is not None
        self.asked.append((constraint.format.text, order.request_id))
        self.tenants.append(order.tenant_id)
        self.num_waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.num_waiting -= 1
        if constraint.format.text == "bad":
            raise RequestError(FailureReason.INVALID_ARGUMENT, "is bad", field="constraint")
        if constraint.format.text == self.full_of:
            raise RequestError(
                FailureReason.QUEUE_FULL, "64 wait", field="constraint", retry_after_ms=1000
            )
        if constraint.format.text == "lost":
            raise WorkerLostError("gone")
        return 5


class Desk:
    def __init__(self, num_workers: int = 1, max_timeout_s: float = 60.0) -> None:
        self.admitted: list[Any] = []
        self.told: list[Verdict] = []
        self.changed = asyncio.Event()
        self.preparations = Preparations(self._admit, self._tell, max_timeout_s)
        self.workers = [Worker() for _ in range(num_workers)]
        self.outlet = Outlet()

    async def start(self) -> "Desk":
        for worker in self.workers:
            await self.preparations.add_worker(worker, [])
        return self

    def submit(self, text: str, *stream_ids: int, **changes: Any) -> None:
        given = submission(
            *(entry(stream_id=stream_id) for stream_id in stream_ids or (0,)),
            sampling=SamplingSpec(constraint=regex(text)),
            **{"request_id": f"r-{text}", **changes},
        )
        self.preparations.start(given, self.outlet)

    def _admit(self, given: Any, outlet: Outlet) -> list[Verdict]:
        self.admitted.append(given)
        return [Verdict(stream_id=s.stream_id) for s in given.sequences]

    def _tell(self, outlet: Outlet, verdicts: list[Verdict]) -> None:
        assert outlet is self.outlet
        self.told += verdicts
        self.changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.told) < count:
                self.changed.clear()
                await self.changed.wait()

    def check_empty(self) -> None:
        assert len(self.preparations) == 0
        assert not self.outlet.preparing


async def test_a_ready_request_reaches_the_core_and_its_verdicts_the_client() -> None:
    desk = await Desk(num_workers=2).start()
    desk.submit("a", 3, 4, tenant_id="t1")
    assert len(desk.preparations) == 2
    assert set(desk.outlet.preparing) == {3, 4}
    assert not desk.told
    await desk.until(2)
    assert [v.stream_id for v in desk.told] == [3, 4]
    assert all(v.refusal is None for v in desk.told)
    assert [worker.asked for worker in desk.workers] == [[("a", "r-a")]] * 2
    assert [worker.tenants for worker in desk.workers] == [["t1"]] * 2
    assert (desk.preparations.num_prepared, desk.preparations.prepare_us) == (1, 10)
    desk.check_empty()


async def test_a_worker_that_does_not_answer_holds_nobody_up_once_another_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing, "STRAGGLER_S", 0.05)
    desk = await Desk(num_workers=3).start()
    frozen, *others = desk.workers
    frozen.gate.clear()
    desk.submit("a", 1)
    await desk.until(1)
    assert desk.told[0].refusal is None
    assert [len(worker.asked) for worker in others] == [1, 1]
    assert (desk.preparations.num_prepared, desk.preparations.prepare_us) == (1, 10)
    await until(lambda: not frozen.num_waiting)
    desk.check_empty()


async def test_while_no_worker_is_ready_all_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparing, "STRAGGLER_S", 0.01)
    desk = await Desk(num_workers=2).start()
    for worker in desk.workers:
        worker.gate.clear()
    desk.submit("a", 1)
    desk.submit("lost", 2)
    await asyncio.sleep(0.1)
    assert not desk.told
    desk.workers[1].gate.set()
    await desk.until(1)
    await asyncio.sleep(0.1)
    # One worker is lost, which says nothing of the other.
    assert [verdict.stream_id for verdict in desk.told] == [1]
    desk.workers[0].gate.set()
    await desk.until(2)
    desk.check_empty()


async def test_a_refusal_is_told_before_slower_workers_have_answered() -> None:
    desk = await Desk(num_workers=2).start()
    desk.workers[0].gate.clear()
    desk.submit("bad", 1)
    await desk.until(1)
    assert desk.told[0].refusal is not None
    assert not desk.admitted
    desk.check_empty()


async def test_a_worker_that_has_no_place_now_is_passed_over_if_another_is_ready() -> None:
    desk = await Desk(num_workers=2).start()
    desk.workers[0].full_of = "a"
    desk.submit("a", 1)
    await desk.until(1)
    assert desk.told[0].refusal is None
    desk.workers[1].full_of = "b"
    desk.workers[0].full_of = "b"
    desk.submit("b", 2)
    await desk.until(2)
    refusal = desk.told[1].refusal
    assert refusal is not None
    assert refusal.reason is FailureReason.QUEUE_FULL
    desk.check_empty()


async def test_a_worker_that_comes_back_and_has_no_place_now_ends_nothing_that_lives() -> None:
    desk = await Desk().start()
    new = Worker()
    new.full_of = "a"
    assert await desk.preparations.add_worker(new, [order("r1", "a"), order("r2", "b")]) == {}


async def test_a_refused_one_never_reaches_the_core() -> None:
    desk = await Desk(num_workers=2).start()
    desk.submit("bad", 1, 2)
    await desk.until(2)
    assert all(v.refusal is not None and v.refusal.message == "is bad" for v in desk.told)
    assert not desk.admitted
    desk.check_empty()


async def test_requests_do_not_wait_for_each_other() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("slow", 1)
    await until(lambda: desk.workers[0].num_waiting)
    desk.workers[0].gate = asyncio.Event()
    desk.workers[0].gate.set()
    desk.submit("quick", 2)
    await desk.until(1)
    assert desk.told[0].stream_id == 2
    await desk.preparations.close()


async def test_a_worker_that_is_lost_meanwhile_holds_nobody_up() -> None:
    desk = await Desk().start()
    desk.submit("lost")
    await desk.until(1)
    assert desk.told[0].refusal is None
    assert len(desk.admitted) == 1


async def test_aborting_on_the_way_gives_the_one_verdict() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1, 2)
    await asyncio.sleep(0.01)
    assert desk.preparations.abort(desk.outlet, 1, aborted())
    assert not desk.preparations.abort(desk.outlet, 1, aborted())
    assert desk.told[0].refusal is not None
    assert desk.told[0].refusal.reason is FailureReason.CANCELLED
    desk.workers[0].gate.set()
    await desk.until(2)
    assert [s.stream_id for s in desk.admitted[0].sequences] == [2]
    desk.check_empty()


async def test_aborting_all_of_a_request_ends_its_preparation() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1, 2)
    await asyncio.sleep(0.01)
    assert desk.preparations.abort_request("r-a", aborted()) == 2
    assert desk.preparations.abort_request("r-a", aborted()) == 0
    desk.submit("b", 3)
    assert desk.preparations.abort(desk.outlet, 3, aborted())
    assert [v.stream_id for v in desk.told] == [1, 2, 3]
    desk.workers[0].gate.set()
    await asyncio.sleep(0.01)
    assert not desk.admitted
    desk.check_empty()


async def test_a_client_that_went_away_is_told_nothing() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1, 2)
    await asyncio.sleep(0.01)
    desk.preparations.close_outlet(desk.outlet)
    desk.workers[0].gate.set()
    await asyncio.sleep(0.01)
    assert not desk.told
    assert not desk.admitted
    desk.check_empty()


async def test_time_on_the_way_counts_against_the_limit() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1, timeout_ms=30)
    await desk.until(1)
    assert desk.told[0].refusal is not None
    assert desk.told[0].refusal.reason is FailureReason.DEADLINE_EXCEEDED
    desk.submit("b", 2, timeout_ms=10_000)
    await asyncio.sleep(0.02)
    desk.workers[0].gate.set()
    await desk.until(2)
    assert 1 <= desk.admitted[0].timeout_ms < 9_999


async def test_an_id_is_taken_and_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1)
    with pytest.raises(RequestError) as caught:
        desk.submit("a", 2)
    assert caught.value.reason is FailureReason.ALREADY_EXISTS
    monkeypatch.setattr("services.scheduler.preparing.MAX_PREPARING", 1)
    with pytest.raises(RequestError) as caught:
        desk.submit("b", 2)
    assert caught.value.reason is FailureReason.QUEUE_FULL
    assert set(desk.outlet.preparing) == {1}
    assert MAX_PREPARING > 1
    await desk.preparations.close()


async def test_failing_all_tells_each() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("a", 1)
    desk.submit("b", 2)
    error = RequestError(FailureReason.DRAINING, "over")
    desk.preparations.fail_all(error)
    assert [v.refusal for v in desk.told] == [error, error]
    desk.check_empty()


async def test_a_new_worker_is_made_ready_for_what_lives_and_what_is_on_its_way() -> None:
    desk = await Desk().start()
    desk.workers[0].gate.clear()
    desk.submit("pending", 1)
    new = Worker()
    refused = await desk.preparations.add_worker(new, [order("r1", "a"), order("r2", "bad")])
    assert set(refused) == {"r2"}
    assert new.asked == [("a", "r1"), ("bad", "r2"), ("pending", "r-pending")]
    desk.preparations.remove_worker(new)
    desk.workers[0].gate.set()
    await desk.until(1)
    with pytest.raises(WorkerLostError):
        await desk.preparations.add_worker(new, [order("r3", "lost")])


# -- the whole loop -----------------------------------------------------------------------------


class Client:
    def __init__(self, engine: Engine) -> None:
        self.deliveries: list[Delivery] = []
        self.changed = asyncio.Event()
        self.engine = engine
        self.outlet = engine.open_outlet(self._take)

    def _take(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        self.changed.set()

    def submit(self, text: str, stream_id: int) -> list[Verdict]:
        sampling = SamplingSpec(constraint=regex(text), max_tokens=8)
        given = submission(
            entry(stream_id=stream_id), request_id=f"r{stream_id}", sampling=sampling
        )
        return self.engine.submit(given, self.outlet)

    async def until_ended(self, count: int) -> None:
        async with asyncio.timeout(30):
            while sum(len(d.ends) for d in self.deliveries) < count:
                self.changed.clear()
                await self.changed.wait()


class PreparingSession(Session):
    async def prepare(self, order: PrepareOrder) -> int:
        assert isinstance(self.link, PreparingLink)
        return await self.link.desk.prepare(order)


class PreparingLink(Link):
    def __init__(self) -> None:
        super().__init__()
        self.desk = Worker()

    async def open(self, max_plans_in_flight: int) -> Session:
        await super().open(max_plans_in_flight)
        self.sessions[-1] = PreparingSession(self, self.limits)
        return self.sessions[-1]


async def test_verdicts_come_before_tokens_and_no_plan_names_what_is_not_ready() -> None:
    link = PreparingLink()
    async with Bench(links=[link]) as bench:
        link.desk.gate.clear()
        client = Client(bench.engine)
        assert client.submit("a", 1) == []
        await asyncio.sleep(0.05)
        assert bench.engine.num_live == 1
        assert bench.core.last_planned_step == 0
        link.desk.gate.set()
        await client.until_ended(1)
        first = client.deliveries[0]
        assert [v.refusal for v in first.verdicts] == [None]
        assert first.tokens is None
        assert client.deliveries[-1].ends[0].failure is None


async def test_a_request_that_the_core_refuses_is_not_prepared() -> None:
    link = PreparingLink()
    async with Bench(links=[link]) as bench:
        client = Client(bench.engine)
        bench.engine.drain()
        (verdict,) = client.submit("a", 1)
        assert verdict.refusal is not None
        assert not link.desk.asked


async def test_a_worker_that_comes_back_is_ready_before_it_takes_plans() -> None:
    link = PreparingLink()
    async with Bench(links=[link], grace_s=30.0) as bench:
        link.gate.clear()
        client = Client(bench.engine)
        client.submit("a", 1)
        await until(lambda: bench.core.num_in_flight)
        link.desk.gate.clear()
        link.kill()
        await bench.until_reason(bool)
        link.is_up = True
        link.gate.set()
        await until(lambda: len(link.desk.asked) == 2)
        assert link.num_opened == 2
        assert bench.core.num_in_flight == 0
        link.desk.gate.set()
        await client.until_ended(1)
        assert client.deliveries[-1].ends[0].failure is None
        assert link.desk.asked == [("a", "r1")] * 2


async def test_what_a_new_worker_refuses_ends_with_its_reason() -> None:
    link = PreparingLink()
    async with Bench(links=[link], grace_s=30.0) as bench:
        link.gate.clear()
        client = Client(bench.engine)
        client.submit("a", 1)
        await until(lambda: bench.core.num_in_flight)

        async def refuse(*_: object) -> int:
            raise RequestError(FailureReason.INVALID_ARGUMENT, "no more", field="constraint")

        link.desk.prepare = refuse  # type: ignore[method-assign]
        link.kill()
        link.is_up = True
        await client.until_ended(1)
        failure = client.deliveries[-1].ends[0].failure
        assert failure is not None
        assert failure.message == "no more"


async def test_a_client_that_leaves_or_aborts_on_the_way_leaves_nothing_behind() -> None:
    link = PreparingLink()
    async with Bench(links=[link]) as bench:
        link.desk.gate.clear()
        client = Client(bench.engine)
        for stream_id in (1, 2, 3):
            client.submit("a", stream_id)
        bench.engine.abort(client.outlet, 1, AbortReason.CANCELLED, 0)
        assert bench.engine.abort_request("r2") == 1
        assert sum(len(d.verdicts) for d in client.deliveries) == 2
        bench.engine.close_outlet(client.outlet)
        assert bench.engine.num_live == 0
        link.desk.gate.set()
        await asyncio.sleep(0.02)
        assert bench.core.last_planned_step == 0


async def test_masks_and_preparations_are_counted() -> None:
    link = PreparingLink()

    def twist(result: Any) -> None:
        object.__setattr__(result, "num_masks", 2)
        object.__setattr__(result, "mask_us", 30)

    link.twist = twist
    async with Bench(links=[link]) as bench:
        client = Client(bench.engine)
        client.submit("a", 1)
        await client.until_ended(1)
        async for load in bench.engine.watch_load():
            if load.num_masks_total:
                break
        assert load.num_prepared_total == 1
        assert load.prepare_us_total == 5
        assert load.mask_us_total == 15 * load.num_masks_total
