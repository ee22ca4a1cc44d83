"""Tool arguments: from the text of a value to JSON, as the tool's JSON Schema declares it.

The declared type comes first (integers and numbers as JSON numbers, true / false / 1 / 0 and null
in any letter case, objects and arrays as JSON), then any strict JSON, then the raw text as a
string. A string, an undeclared argument and one without a type are raw text. Where a string is one
of several declared types, text that fits none of the others stays text. Numbers keep their digits,
if every reader can hold them.
An unusual schema never fails a request: what cannot be read counts as undeclared.
"""

import json
import re
from json.encoder import encode_basestring
from typing import Any, NoReturn

from shared.argument_types import Types, declared_properties, declared_types
from shared.json_limits import is_portable, is_portable_number

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]{1,6}))?\Z")
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}
# Integral values of a `number` are written out up to here (2.0 as 2, 1e3 as 1000).
_MAX_PLAIN_DIGITS = 16


def quote(text: str) -> str:
    """A JSON string, non-ASCII kept."""
    return encode_basestring(text)


def escape(text: str) -> str:
    """The inside of a JSON string; escaping pieces one by one equals escaping the whole."""
    return encode_basestring(text)[1:-1]


class ArgumentTypes:
    """Declared types of one tool's arguments."""

    def __init__(self, schema: Any) -> None:  # noqa: ANN401  (any JSON value)
        """Read a JSON Schema of the arguments object; anything else declares nothing."""
        self._root = schema
        self._properties = declared_properties(schema)
        self._known: dict[str, Types] = {}

    def of(self, key: str) -> Types | None:
        """Declared types in the order to try, None for raw text."""
        if key not in self._properties:
            return None
        types = self._known.get(key)
        if types is None:
            types = declared_types(self._properties[key], self._root)
            self._known[key] = types
        return None if types in ((), ("string",)) else types


def to_json(text: str, types: Types | None) -> str:
    """The JSON of an argument."""
    if types is None:
        return quote(text)
    stripped = text.strip()
    for name in types:
        value = _convert(stripped, name)
        if value is not None:
            return value
    if "string" not in types:
        value = strict_json(stripped)
        if value is not None:
            return value
    return quote(text)


def _convert(text: str, name: str) -> str | None:
    if name == "null":
        return "null" if text.lower() == "null" else None
    if name == "integer":
        return text if _INTEGER.match(text) and is_portable_number(text) else None
    if name == "number":
        return _number(text)
    if name == "boolean":
        return _BOOLEANS.get(text.lower())
    if name == "string":
        return None  # the caller keeps the text with its spaces
    value = strict_json(text)
    opening = "{" if name == "object" else "["
    return value if value is not None and value.startswith(opening) else None


def _number(text: str) -> str | None:
    match = _NUMBER.match(text)
    if match is None or not is_portable_number(text):
        return None
    whole, fraction, exponent = match[1], (match[2] or "").rstrip("0"), match[3]
    if not fraction and exponent is None:
        return whole
    shift = int(exponent or 0) - len(fraction)
    digits = (whole + fraction).lstrip("-0")
    if not digits or 0 <= shift <= _MAX_PLAIN_DIGITS - len(digits):
        sign = "-" if digits and whole.startswith("-") else ""
        return sign + (digits + "0" * shift if digits else "0")
    return text


def strict_json(text: str) -> str | None:
    """The text itself if it is one strict JSON value that every reader can hold.

    That includes us: clients send calls back with the next turn.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_int=_carried, parse_float=_carried)
    except (ValueError, RecursionError):
        return None
    return text if is_portable(value) else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _carried(text: str) -> str:
    """A number as it is written: nobody here needs its value."""
    if not is_portable_number(text):
        raise ValueError("no reader can hold this number")
    return text
