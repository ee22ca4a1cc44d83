"""JSON objects of a checkpoint, with the faults that Python's parser lets pass."""

import json
from collections.abc import Sequence
from typing import Any


def parse_object(text: bytes) -> dict[str, Any]:
    """One JSON object in UTF-8 that names no key twice.

    Raises:
        ValueError: It is something else; the text says what.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(value, dict):
        # Not TypeError: the caller treats every fault of the text alike.
        raise ValueError("is no JSON object")  # noqa: TRY004
    return value


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"names {key!r} twice")
            seen.add(key)
    return found
