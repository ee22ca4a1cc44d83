"""One HTTP request from its headers to its last byte: who, since when, what to undo at its end.

Whatever a request takes (a place in admission, a stream to the detokenizer, a watcher of its
socket) is registered in `cleanup` and undone there on every path, a client that hangs up included.
"""

import asyncio
import contextlib
import re
import time
import uuid
from typing import Final

from starlette.types import Receive, Scope

from services.frontend.auth import Tenant
from shared.tracing import Span, start_span

MAX_REQUEST_ID: Final = 128
_KEY: Final = "visit"
_TRACEPARENT: Final = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Visit:
    """State of one HTTP request."""

    def __init__(self, scope: Scope) -> None:
        """Name the request; the caller's `x-request-id` is kept if it is printable and short."""
        given = header(scope, b"x-request-id")
        self.has_given_id = is_label(given)
        self.request_id = given if self.has_given_id else uuid.uuid4().hex
        self.started = time.monotonic()
        self.cleanup = contextlib.ExitStack()
        self.tenant = Tenant()
        self.response_id = ""
        self.seed: int | None = None
        self.status = 0
        self.is_complete = False
        self.is_client_gone = False
        self.span: Span | None = None
        self._watcher: asyncio.Task[None] | None = None
        scope[_KEY] = self

    @property
    def age_s(self) -> float:
        """Seconds since the headers were read."""
        return time.monotonic() - self.started

    @property
    def tenant_id(self) -> str:
        """Whose requests this one is counted among; empty where no keys are set."""
        return self.tenant.tenant_id

    @property
    def traceparent(self) -> str:
        """The context that later services work below."""
        return self.span.traceparent if self.span is not None else ""

    def start_trace(self, scope: Scope) -> None:
        """Open the root span, below the caller's span if the request names one."""
        self.span = start_span(
            "http",
            traceparent=_sound_traceparent(header(scope, b"traceparent")),
            attributes={
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "glm.request_id": self.request_id,
            },
        )

    def watch(self, receive: Receive) -> None:
        """From now on a client that hangs up cancels the request; the body has been read."""
        owner = asyncio.current_task()
        self._watcher = asyncio.create_task(self._wait_for_hangup(receive, owner))
        self.cleanup.callback(self._watcher.cancel)

    def detach(self) -> contextlib.ExitStack:
        """Hand over what is to be undone: the request goes on without its client."""
        if self._watcher is not None:
            self._watcher.cancel()
        return self.cleanup.pop_all()

    async def _wait_for_hangup(
        self, receive: Receive, owner: "asyncio.Task[object] | None"
    ) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        # The end of our own answer reads as a hang-up too.
        if not self.is_complete and owner is not None:
            self.is_client_gone = True
            owner.cancel()


def _sound_traceparent(text: str) -> str:
    """The caller's trace context; empty when it is none of W3C's."""
    return text if _TRACEPARENT.fullmatch(text) else ""


def visit_of(scope: Scope) -> Visit:
    """The visit that the middleware opened."""
    visit = scope[_KEY]
    assert isinstance(visit, Visit)
    return visit


def header(scope: Scope, name: bytes) -> str:
    """A header of the request; empty if it is not there."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return ""


def is_label(text: str) -> bool:
    """Whether a caller's id can stand in headers and logs."""
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()
