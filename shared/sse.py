"""Server-sent events: framing only, for everyone who writes into a stream.

One event is one `data:` line with one JSON document and a blank line. JSON has no raw line feeds,
but some clients also cut at U+0085, U+2028 and U+2029; inside JSON strings these are written as
escapes.
"""

from typing import Final

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
# The Messages API says so in place of a comment.
PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

_SEPARATORS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def event(document: bytes) -> bytes:
    """The event of one JSON document, as UTF-8 without line breaks."""
    return b"data: " + one_line(document) + b"\n\n"


def named_event(name: bytes, document: bytes) -> bytes:
    """The same under a name."""
    return b"event: " + name + b"\ndata: " + one_line(document) + b"\n\n"


def one_line(document: bytes) -> bytes:
    """The same JSON without characters that any client takes for a line end."""
    if not document.isascii():
        for separator, escape in _SEPARATORS:
            if separator in document:
                document = document.replace(separator, escape)
    return document
