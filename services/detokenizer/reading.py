"""Bytes of a request that need parsing: tool schemas, checked ids."""

import json
from array import array

import msgspec

from shared.errors import FailureReason, RequestError


def parse_schema(data: bytes, field: str) -> object:
    """A tool's JSON Schema, None for no bytes; `RequestError` for anything but JSON."""
    if not data:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise RequestError(
            FailureReason.INVALID_ARGUMENT, f"{field} is no JSON", field=field
        ) from None


def parse_members(data: bytes, field: str) -> bytes:
    """The members of a JSON object, without its braces; `RequestError` for anything else."""
    if not data:
        return b""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError(
            FailureReason.INVALID_ARGUMENT, f"{field} is no JSON object", field=field
        )
    return msgspec.json.encode(value)[1:-1]


def check_token_ids(data: bytes, field: str, num_ids: int) -> None:
    """Refuse packed ids that no token of the tokenizer has."""
    largest = max(array("I", data[: len(data) // 4 * 4]), default=0)
    if largest >= num_ids:
        raise RequestError(
            FailureReason.INVALID_ARGUMENT,
            f"{field}: id {largest} is not in the vocabulary of {num_ids}",
            field=field,
        )
