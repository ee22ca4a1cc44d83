"""Answers that are finished after their client has gone: kept, to be asked for later.

A background request keeps its place in admission and its stream to the detokenizer; both are given
back when it ends, however it ends. Whoever cancels it does so by its id, through the mesh.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.frontend.errors import ApiError, from_request_error
from services.frontend.visit import Visit
from shared.errors import FailureReason, RequestError
from shared.log import get_logger

_logger = get_logger(__name__)


class KeptAnswer(Protocol):
    """Where the object of a request is kept."""

    async def keep(self, object_json: bytes) -> None:
        """Keep the object in place of its earlier state."""

    def unfinished(self, status: str, error: ApiError | None = None) -> bytes:
        """The object without an output."""


class BackgroundWork:
    """The requests whose clients do not wait."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def go_on(
        self, answer: Callable[[], Awaitable[bytes]], kept: KeptAnswer, visit: Visit
    ) -> bytes:
        """Keep the object as it is now, and as `answer` will give it; returns the former."""
        pending = kept.unfinished("in_progress")
        # From here on a client that hangs up ends nothing.
        with contextlib.ExitStack() as taken:
            taken.push(visit.detach())
            await kept.keep(pending)
            task = asyncio.create_task(self._finish(answer, kept, visit))
            # Not inside the task, which may be cancelled before it has begun.
            task.add_done_callback(_closing(taken.pop_all()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pending

    async def stop(self) -> None:
        """Give up what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(
        self, answer: Callable[[], Awaitable[bytes]], kept: KeptAnswer, visit: Visit
    ) -> None:
        try:
            await kept.keep(await answer())
        except RequestError as error:
            is_cancelled = error.reason is FailureReason.CANCELLED
            shown = None if is_cancelled else from_request_error(error)
            status = "cancelled" if is_cancelled else "failed"
            await kept.keep(kept.unfinished(status, shown))
        except Exception:
            # No handler is left who would log it.
            _logger.exception("background request failed", extra={"label": visit.request_id})
            fault = ApiError(500, "internal error", code="internal_error")
            await kept.keep(kept.unfinished("failed", fault))


def _closing(taken: contextlib.ExitStack) -> Callable[[object], None]:
    def close(_: object) -> None:
        taken.close()

    return close
