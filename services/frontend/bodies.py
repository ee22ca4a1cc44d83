"""Reads a request's body: bounded in bytes and time, strict JSON, an object at the top.

Whatever is wrong ends in an `ApiError`: 413 over the limit, 408 when the bytes do not come, 400 for
a wrong content type or encoding, broken UTF-8, malformed JSON, NaN, unpaired surrogates or absurd
numbers. A key that stands twice counts with its last value, as in most JSON readers.
"""

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from services.frontend.errors import ApiError, invalid

# A client that is still sending rarely reads the answer: up to this many times the limit is read
# and thrown away first, so that the 413 arrives.
DRAIN_FACTOR: Final = 4


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body and how large it was."""

    value: dict[str, Any]
    num_bytes: int


async def read_body(
    scope: Scope,
    receive: Receive,
    *,
    max_bytes: int,
    timeout_s: float,
    hold: Callable[[int], None] = lambda _: None,
) -> Body:
    """The body as an object.

    Args:
        scope: The request.
        receive: Where its bytes come from.
        max_bytes: More is a 413.
        timeout_s: Later is a 408.
        hold: Told of bytes before they are kept; raises when there is no room for them.
    """
    _check_content_type(scope)
    _check_content_encoding(scope)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(scope, receive, max_bytes, hold)
    except TimeoutError:
        raise ApiError(
            408, f"The request body did not arrive within {timeout_s:g} s.", code="request_timeout"
        ) from None
    return Body(decode(data), len(data))


def decode(data: bytes | bytearray) -> dict[str, Any]:
    """Strict JSON to an object."""
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise _explain(bytes(data), error) from None
    except RecursionError:
        raise invalid("The request body nests too deep.", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The request body must be a JSON object.", None, "invalid_type")
    return value


def _check_content_encoding(scope: Scope) -> None:
    """Nothing is unpacked: a small body could become any size."""
    for coding in (value for name, value in scope["headers"] if name == b"content-encoding"):
        if coding.strip().lower() != b"identity":
            raise invalid(
                f"The content encoding must be identity, got {coding.decode('latin-1')[:100]!r}.",
                None,
                "invalid_content_encoding",
            )


def _check_content_type(scope: Scope) -> None:
    kind = next((v for k, v in scope["headers"] if k == b"content-type"), b"")
    media = kind.split(b";", 1)[0].strip().lower()
    if media != b"application/json" and not (
        media.startswith(b"application/") and media.endswith(b"+json")
    ):
        shown = kind[:80].decode("latin-1") or "none"
        raise invalid(
            f"The content type must be application/json, got {shown}.", None, "invalid_content_type"
        )


async def _read(
    scope: Scope, receive: Receive, max_bytes: int, hold: Callable[[int], None]
) -> bytearray:
    declared = _declared_length(scope)
    if declared > DRAIN_FACTOR * max_bytes:
        raise _too_large(max_bytes)
    data, size = bytearray(), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            hold(len(chunk))
            data += chunk
        elif size > DRAIN_FACTOR * max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            break
    if size > max_bytes:
        raise _too_large(max_bytes)
    return data


def _declared_length(scope: Scope) -> int:
    text = next((v for k, v in scope["headers"] if k == b"content-length"), b"")
    return int(text) if text.isdigit() else 0


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {max_bytes} bytes.",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _explain(data: bytes, error: msgspec.DecodeError) -> ApiError:
    """Say what is wrong, and where if a laxer reader still finds the field."""
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as broken:
        return invalid(
            f"The request body is not valid UTF-8 (byte {broken.start}).", None, "invalid_utf8"
        )
    except (ValueError, RecursionError):
        return invalid(f"The request body is not valid JSON: {error}.", None, "invalid_json")
    for path, fault in _faults(value):
        name = f"'{path}'" if path else "the request body"
        return invalid(f"Invalid {name}: {fault}.", path or None)
    return invalid(f"The request body is not valid JSON: {error}.", None, "invalid_json")


def _faults(root: object) -> Iterator[tuple[str, str]]:
    """Numbers that are not finite and strings with unpaired surrogates, with their paths."""
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield path, "the number is not finite"
        elif isinstance(value, str) and _has_surrogate(value):
            yield path, "the text holds an unpaired surrogate"
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, dict):
            if any(_has_surrogate(key) for key in value):
                yield path, "a key holds an unpaired surrogate"
                return
            stack.extend((f"{path}.{key}" if path else key, item) for key, item in value.items())


def _has_surrogate(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)
