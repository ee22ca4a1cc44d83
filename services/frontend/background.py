"""Answers that are finished after their client has gone: kept, to be asked for later.

A background request keeps its place in admission and its stream to the detokenizer; both are given
back when it ends, however it ends. Whoever cancels or deletes it, in whichever process, does so in
the store and asks the mesh to end it; here the store is looked at, so it ends without the mesh too.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

from services.frontend.errors import ApiError, from_request_error
from services.frontend.visit import Visit
from shared.errors import FailureReason, RequestError
from shared.log import get_logger

_logger = get_logger(__name__)

# How long a response that was cancelled elsewhere may go on.
LOOK_S: Final = 0.4


class KeptAnswer(Protocol):
    """Where the object of a request is kept."""

    async def keep(self, object_json: bytes, *, is_open: bool = False) -> bool:
        """Keep the object in place of its earlier state; `is_open` while it is worked on.

        False where that cannot be, or the object has ended or was deleted.
        """

    def unfinished(self, status: str, error: ApiError | None = None) -> bytes:
        """The object without an output."""


class EndedResponses(Protocol):
    """Where all processes of a gateway see what was ended."""

    async def look(self, response_ids: Collection[str]) -> list[str]:
        """Those of the ids that somebody ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is waited for, and how to give it up; after that the wait ends with the error."""

    wait: Callable[[], Awaitable[bytes]]
    fail: Callable[[RequestError], None]


class BackgroundWork:
    """The requests whose clients do not wait."""

    def __init__(self) -> None:
        """Nothing runs."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._answers: dict[str, Answer] = {}

    async def watch(self, ended: EndedResponses) -> None:
        """Give up what was ended in the store, until cancelled."""
        while True:
            for response_id in await ended.look(list(self._answers)):
                self.give_up(response_id)
            await asyncio.sleep(LOOK_S)

    def give_up(self, response_id: str) -> None:
        """End the work on a response, if it is done here."""
        answer = self._answers.get(response_id)
        if answer is not None:
            answer.fail(RequestError(FailureReason.CANCELLED, "the response was cancelled"))

    async def go_on(self, answer: Answer, kept: KeptAnswer, visit: Visit) -> bytes:
        """Keep the object as it is now, and as `answer` will give it; returns the former.

        A 503 if it cannot be kept: nobody could ever ask for it.
        """
        pending = kept.unfinished("in_progress")
        # From here on a client that hangs up ends nothing.
        with contextlib.ExitStack() as taken:
            taken.push(visit.detach())
            if not await kept.keep(pending, is_open=True):
                raise ApiError(503, "the response cannot be kept", code="service_unavailable")
            self._answers[visit.response_id] = answer
            taken.callback(self._answers.pop, visit.response_id)
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

    async def _finish(self, answer: Answer, kept: KeptAnswer, visit: Visit) -> None:
        try:
            if not await kept.keep(await answer.wait()):
                # It must not stay as if it were worked on. What has ended already stays as it is.
                text = "the finished response is too large to be kept, or the store takes no more"
                fault = ApiError(500, text)
                await kept.keep(kept.unfinished("failed", fault))
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
