"""How each protocol writes what the gateway itself says into a stream: errors and signs of life.

Frames of the output come from the detokenizer as they are. A failed stream is ended from here, also
when the detokenizer is gone.
"""

import json
from dataclasses import dataclass
from typing import Any, Final, Protocol

from services.frontend.errors import ApiError
from shared import sse

# Error types of the Messages API by status; others are api_error.
_MESSAGE_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Framing(Protocol):
    """One protocol's words."""

    @property
    def keep_alive(self) -> bytes:
        """Shows a silent stream to be alive."""

    @property
    def counts_events(self) -> bool:
        """Whether the number of events is told at a failure."""

    def failure(self, error: ApiError, num_events: int) -> bytes:
        """The end of a stream that failed after so many events."""


@dataclass(frozen=True, slots=True)
class ChunkFraming:
    """Chats, completions and tokens: an event with the envelope, then [DONE]."""

    keep_alive: bytes = sse.KEEP_ALIVE
    counts_events: bool = False

    def failure(self, error: ApiError, num_events: int) -> bytes:
        """The envelope as an event."""
        del num_events  # chunks are not numbered
        return sse.event(error.body()) + sse.DONE


@dataclass(frozen=True, slots=True)
class ResponseFraming:
    """Responses: an `error` event with its number."""

    keep_alive: bytes = sse.KEEP_ALIVE
    counts_events: bool = True

    def failure(self, error: ApiError, num_events: int) -> bytes:
        """The error as an event of its own kind."""
        document: dict[str, Any] = {"type": "error", "code": error.code, "message": error.message}
        document |= {"param": error.param, "sequence_number": num_events}
        return sse.named_event(b"error", _encode(document))


@dataclass(frozen=True, slots=True)
class MessageFraming:
    """Messages: an `error` event; `ping` events instead of comments."""

    keep_alive: bytes = sse.PING
    counts_events: bool = False

    def failure(self, error: ApiError, num_events: int) -> bytes:
        """The error in this protocol's shape."""
        del num_events  # events are not numbered
        return sse.named_event(b"error", message_error(error))


CHUNKS: Final = ChunkFraming()


def message_error(error: ApiError, request_id: str = "") -> bytes:
    """An error as the Messages API writes it."""
    kind, message = _MESSAGE_TYPES.get(error.status, "api_error"), error.message
    if error.code == "context_length_exceeded":  # by these words agents know to shorten
        message = f"prompt is too long: {message}"
    fields: dict[str, Any] = {"type": kind, "message": message}
    if error.details:
        fields["details"] = error.details
    document: dict[str, Any] = {"type": "error", "error": fields}
    if request_id:
        document["request_id"] = request_id
    return _encode(document)


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
