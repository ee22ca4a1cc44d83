"""Answers that are finished after their client has gone."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from services.frontend import background
from services.frontend.background import Answer, BackgroundWork
from services.frontend.errors import ApiError
from services.frontend.visit import Visit
from shared.errors import FailureReason, RequestError


class Kept:
    """Remembers the states of one object."""

    def __init__(self, takes: int = 100) -> None:
        self.takes = takes
        self.states: list[bytes] = []
        self.were_open: list[bool] = []

    async def keep(self, object_json: bytes, *, is_open: bool = False) -> bool:
        if len(object_json) > self.takes:
            return False
        self.states.append(object_json)
        self.were_open.append(is_open)
        return True

    def unfinished(self, status: str, error: ApiError | None = None) -> bytes:
        return status.encode() + (b" " + error.message.encode() if error else b"")


class Waiting:
    """An answer that comes when it is given up, and not before."""

    def __init__(self) -> None:
        self._end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.answer = Answer(wait=self._wait, fail=self._end.set_exception)

    async def _wait(self) -> bytes:
        return await self._end


class Store:
    """Says what was ended, once."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.asked: list[list[str]] = []

    async def look(self, response_ids: Collection[str]) -> list[str]:
        self.asked.append(list(response_ids))
        ended, self.ended = self.ended, []
        return ended


def visit() -> Visit:
    return Visit({"type": "http", "method": "POST", "path": "/", "headers": []})


async def finish(result: bytes | Exception) -> tuple[Kept, list[str]]:
    """The states of an answer with that end, and what was undone."""
    work, kept, undone, made = BackgroundWork(), Kept(), list[str](), visit()
    made.cleanup.callback(undone.append, "place")
    is_due = asyncio.Event()

    async def wait() -> bytes:
        await is_due.wait()
        if isinstance(result, Exception):
            raise result
        return result

    answer = Answer(wait=wait, fail=lambda _: None)
    assert await work.go_on(answer, kept, made) == b"in_progress"
    made.cleanup.close()
    assert not undone, "the request still runs"
    is_due.set()
    async with asyncio.timeout(30):
        while not undone:  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0)
    return kept, undone


@pytest.mark.parametrize(
    ("result", "last"),
    [
        (b"done", b"done"),
        (RequestError(FailureReason.CANCELLED, "x"), b"cancelled"),
        (RequestError(FailureReason.UPSTREAM_LOST, "lost"), b"failed lost"),
        (ValueError("secret"), b"failed internal error"),
    ],
)
async def test_the_end_is_kept_and_everything_given_back(result: Any, last: bytes) -> None:
    kept, undone = await finish(result)
    assert kept.states == [b"in_progress", last]
    assert kept.were_open == [True, False]
    assert undone == ["place"]


async def test_what_still_runs_is_given_up_at_the_end() -> None:
    work, kept, made = BackgroundWork(), Kept(), visit()
    undone: list[str] = []
    made.cleanup.callback(undone.append, "place")
    await work.go_on(Waiting().answer, kept, made)
    await work.stop()
    assert undone == ["place"]


async def test_a_store_that_fails_gives_everything_back() -> None:
    class Broken(Kept):
        async def keep(self, object_json: bytes, *, is_open: bool = False) -> bool:
            raise OSError("disk full")

    made, undone = visit(), list[str]()
    made.cleanup.callback(undone.append, "place")
    with pytest.raises(OSError, match="disk full"):
        await BackgroundWork().go_on(Waiting().answer, Broken(), made)
    assert undone == ["place"]


async def test_what_was_ended_in_the_store_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LOOK_S", 0.001)
    work, store, kept, made = BackgroundWork(), Store(), Kept(), visit()
    made.response_id = "r1"
    undone = asyncio.Event()
    made.cleanup.callback(undone.set)
    watching = asyncio.create_task(work.watch(store))
    await work.go_on(Waiting().answer, kept, made)
    while ["r1"] not in store.asked:  # noqa: ASYNC110  # told by no event
        await asyncio.sleep(0.001)
    assert not undone.is_set()
    store.ended = ["r0", "r1"]
    async with asyncio.timeout(30):
        await undone.wait()
    assert kept.states == [b"in_progress", b"cancelled"]
    store.asked.clear()
    while not store.asked:  # noqa: ASYNC110  # told by no event
        await asyncio.sleep(0.001)
    assert store.asked == [[]], "what has ended is not asked about"
    watching.cancel()


async def test_an_answer_too_large_to_be_kept_has_failed() -> None:
    kept, _ = await finish(b"x" * 101)
    assert kept.states[0] == b"in_progress"
    assert kept.states[1][:39] == b"failed the finished response is too lar"
    assert kept.were_open == [True, False]


async def test_what_cannot_be_kept_is_not_worked_on() -> None:
    made, undone = visit(), list[str]()
    made.cleanup.callback(undone.append, "place")
    with pytest.raises(ApiError, match="cannot be kept") as caught:
        await BackgroundWork().go_on(Waiting().answer, Kept(takes=0), made)
    assert (caught.value.status, undone) == (503, ["place"])
