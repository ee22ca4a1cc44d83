"""Requests with a fault each: in the JSON, the fields, the length, the schema, HTTP itself."""

from dataclasses import dataclass
from typing import Any, Final

from tests.e2e.asks import CHAT, MESSAGES, RESPONSES
from tests.e2e.visitors import request

_USER: Final = [{"role": "user", "content": "Repeat: a b"}]
_GOOD: Final[dict[str, Any]] = {"model": "glm-nano", "messages": _USER, "max_tokens": 20}


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes to send, and what a client has to get."""

    name: str
    data: bytes
    status: int
    word: str
    """Stands in the answer."""


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema, "strict": True},
    }


def _fault(name: str, fields: dict[str, Any], word: str, status: int = 400) -> Fault:
    return Fault(name, request(CHAT, {**_GOOD, **fields}), status, word)


FAULTS: Final = (
    Fault("broken JSON", request(CHAT, b'{"model": "glm-nano", '), 400, "invalid_json"),
    Fault("broken text", request(CHAT, b'{"model": "\xff"}'), 400, "invalid_utf8"),
    Fault("no JSON", request(CHAT, b"x", Content_Type="text/plain"), 400, "content_type"),
    _fault("a field", {"temperature": -1}, "temperature"),
    _fault("a field of a stream", {"top_p": "much", "stream": True}, "top_p"),
    _fault("a model", {"model": "gpt-9", "stream": True}, "model_not_found", 404),
    _fault("too long", {"messages": [{"role": "user", "content": "word " * 20_000}]}, "context"),
    _fault("more than the context", {"max_tokens": 10**6, "stream": True}, "1000000"),
    _fault("a schema", {"response_format": _format({"type": "rocket"})}, "rocket"),
    _fault(
        "a schema of a stream",
        {"response_format": _format({"$ref": "#/$defs/nowhere"}), "stream": True},
        "nowhere",
    ),
    _fault("an expression", {"structured_outputs": {"regex": "(["}}, "structured_outputs"),
    _fault("a tool", {"tools": [{"type": "rocket"}]}, "tools"),
    Fault("a response", request(RESPONSES, {"model": "glm-nano", "input": 7}), 400, "input"),
    Fault(
        "a message",
        request(MESSAGES, {"model": "glm-nano", "messages": _USER, "stream": True}),
        400,
        "max_tokens",
    ),
    Fault("a huge header", request(CHAT, _GOOD, X_Long="a" * 100_000), 431, "invalid_http"),
    Fault(
        "many headers", request(CHAT, _GOOD, **{f"X_{n}": "a" * 99 for n in range(1500)}), 431, ""
    ),
    Fault("a length of words", request(CHAT, _GOOD, Content_Length="much"), 400, "invalid_http"),
    Fault("a short length", request(CHAT, _GOOD, Content_Length="9"), 400, "invalid_json"),
    Fault("a body that does not come", request(CHAT, _GOOD, Content_Length="9999"), 408, "timeout"),
    Fault("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
)
