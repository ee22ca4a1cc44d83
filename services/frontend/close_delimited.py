"""Answers to clients of HTTP/1.0, which know no chunks.

An answer without a length ends with its connection then, as RFC 9112 (6.1, 6.3) has it. One that
broke off ends with a reset: an orderly end would make it look whole.
"""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http_protocol import Connection, connection_of

CHUNKLESS_VERSIONS: Final = frozenset({"0.9", "1.0"})


class CloseDelimited:
    """ASGI middleware that keeps chunks from those who cannot read them."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before `app`, next to the protocol."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        connection = connection_of(scope)
        if connection is None or scope["http_version"] not in CHUNKLESS_VERSIONS:
            await self._app(scope, receive, send)
            return
        answer = _Answer(connection, send)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            if answer.is_open:
                connection.drop()


class _Answer:
    """One answer; `is_open` while it has no length and no end."""

    def __init__(self, connection: Connection, send: Send) -> None:
        self.is_open = False
        self._connection = connection
        self._send = send

    async def send(self, message: Message) -> None:
        """Pass a part on, as a part of its own length where the whole has none."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.is_open = b"content-length" not in names
            if self.is_open:
                self._connection.end_by_close()
            await self._send(message)
            return
        if self.is_open:
            self._connection.expect(len(message.get("body", b"")))
        await self._send(message)
        self.is_open = self.is_open and message.get("more_body", False)
