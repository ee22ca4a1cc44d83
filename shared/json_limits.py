"""JSON that a model wrote and that clients send back: what every reader and writer can carry."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

# Writers and templates recurse over it, and so do the libraries of clients.
MAX_DEPTH: Final = 64
# Jackson, and so clients in Java, refuse a longer number; Python's readers one of 4,301 digits.
MAX_NUMBER_CHARS: Final = 1000
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def nests_within(value: Any, limit: int = MAX_DEPTH) -> bool:  # noqa: ANN401  (any JSON value)
    """Whether a value has at most so many levels of arrays and objects."""
    level = _containers([value])
    for _ in range(limit):
        if not level:
            return True
        level = [child for item in level for child in _containers(_children(item))]
    return not level


def is_portable(value: Any) -> bool:  # noqa: ANN401  (any JSON value)
    """Whether a decoded value nests within bounds and can be written as UTF-8."""
    if not nests_within(value):
        return False
    pending = [value]
    for item in pending:  # grows while it runs
        if isinstance(item, str):
            if not item.isascii() and _SURROGATE.search(item):
                return False
        elif isinstance(item, Mapping):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return True


def is_portable_number(text: str) -> bool:
    """Whether every reader can hold a JSON number.

    Most read numbers as doubles: beyond their range some fail, others write null in its place when
    they send it back.
    """
    return len(text) <= MAX_NUMBER_CHARS and math.isfinite(float(text))


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, Mapping | list)]


def _children(value: Mapping[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value
