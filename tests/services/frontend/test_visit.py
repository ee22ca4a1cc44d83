"""One request's state and its cleanup."""

import asyncio
from typing import Any

import pytest

from services.frontend.visit import Visit, header, is_label, visit_of


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": "/v1/x", "headers": list(headers)}


def test_a_visit_is_found_again_in_its_scope() -> None:
    request = scope()
    assert Visit(request) is visit_of(request)


def test_headers_are_read_by_name() -> None:
    request = scope((b"a", b"1"), (b"b", b"2"))
    assert header(request, b"b") == "2"
    assert header(request, b"c") == ""


@pytest.mark.parametrize(
    ("text", "is_sound"), [("a b", True), ("", False), ("é", False), ("a\n", False)]
)
def test_labels_are_printable_ascii(text: str, is_sound: bool) -> None:
    assert is_label(text) is is_sound


def test_without_tracing_the_callers_context_is_passed_on() -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    request = scope((b"traceparent", parent.encode()))
    visit = Visit(request)
    assert visit.traceparent == ""
    visit.start_trace(request)
    assert visit.traceparent == parent


@pytest.mark.parametrize("text", ["x", "00-" + "A" * 32 + "-" + "b" * 16 + "-01", "0" * 9999])
def test_a_context_that_is_none_is_not_passed_on(text: str) -> None:
    request = scope((b"traceparent", text.encode()))
    visit = Visit(request)
    visit.start_trace(request)
    assert visit.traceparent == ""


async def test_a_hang_up_cancels_the_request() -> None:
    visit, gone = Visit(scope()), asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> None:
        with visit.cleanup:
            visit.watch(receive)
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    gone.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert visit.is_client_gone


async def test_the_end_of_our_own_answer_is_no_hang_up() -> None:
    visit = Visit(scope())
    visit.is_complete = True

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    with visit.cleanup:
        visit.watch(receive)
        await asyncio.sleep(0.01)
    assert not visit.is_client_gone


async def test_the_watcher_ends_with_the_visit() -> None:
    visit = Visit(scope())

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    before = asyncio.all_tasks()
    with visit.cleanup:
        visit.watch(receive)
        await asyncio.sleep(0)
        watchers = asyncio.all_tasks() - before
    await asyncio.wait(watchers)
    assert all(task.cancelled() for task in watchers)
