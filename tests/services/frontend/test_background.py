"""Answers that are finished after their client has gone."""

import asyncio
from typing import Any

import pytest

from services.frontend.background import BackgroundWork
from services.frontend.errors import ApiError
from services.frontend.visit import Visit
from shared.errors import FailureReason, RequestError


class Kept:
    """Remembers the states of one object."""

    def __init__(self) -> None:
        self.states: list[bytes] = []

    async def keep(self, object_json: bytes) -> None:
        self.states.append(object_json)

    def unfinished(self, status: str, error: ApiError | None = None) -> bytes:
        return status.encode() + (b" " + error.message.encode() if error else b"")


def visit() -> Visit:
    return Visit({"type": "http", "method": "POST", "path": "/", "headers": []})


async def finish(result: bytes | Exception) -> tuple[Kept, list[str]]:
    """The states of an answer with that end, and what was undone."""
    work, kept, undone, made = BackgroundWork(), Kept(), list[str](), visit()
    made.cleanup.callback(undone.append, "place")
    is_due = asyncio.Event()

    async def answer() -> bytes:
        await is_due.wait()
        if isinstance(result, Exception):
            raise result
        return result

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
    assert undone == ["place"]


async def test_what_still_runs_is_given_up_at_the_end() -> None:
    work, kept, made = BackgroundWork(), Kept(), visit()
    undone: list[str] = []
    made.cleanup.callback(undone.append, "place")
    await work.go_on(asyncio.Event().wait, kept, made)  # type: ignore[arg-type]  # never returns
    await work.stop()
    assert undone == ["place"]


async def test_a_store_that_fails_gives_everything_back() -> None:
    class Broken(Kept):
        async def keep(self, object_json: bytes) -> None:
            raise OSError("disk full")

    made, undone = visit(), list[str]()
    made.cleanup.callback(undone.append, "place")
    with pytest.raises(OSError, match="disk full"):
        await BackgroundWork().go_on(asyncio.Event().wait, Broken(), made)  # type: ignore[arg-type]
    assert undone == ["place"]
