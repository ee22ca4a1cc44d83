"""Raw text of a string argument: what its schema says about it, as a terminal."""

import re
from typing import Any, Final

from services.worker.grammar.arguments import Argument
from services.worker.grammar.writer import ANY_TEXT, refused, regex_terminal

_DATE: Final = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL: Final = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Formats of JSON Schema that an expression can say.
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+D|T[0-9]+[HMS]|[0-9]+[YMW]|[0-9]+DT[0-9]+[HMS])",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "uri": r"[a-z][a-z0-9+.-]*:[!#$&-;=?-Z_a-z~%\[\]]+",
}
_ENDS_UNESCAPED: Final = re.compile(r"(?<!\\)(\\\\)*\$\Z")


def string_terminal(argument: Argument, *, is_strict: bool) -> str:
    """The text of a string; a lax tool's string is any text, as in unconstrained calls.

    Raises:
        RequestError: A strict one is described by what no expression can say.
    """
    facets = argument.facets
    if not is_strict or not facets:
        return ANY_TEXT
    parts = []
    if "pattern" in facets:
        parts.append(_from_pattern(facets["pattern"], argument.where))
    if "format" in facets:
        found = _FORMATS.get(str(facets["format"]))
        if found is None:
            raise refused(argument.where, f"format {facets['format']!r} cannot be enforced")
        parts.append(regex_terminal(found))
    least, most = facets.get("minLength"), facets.get("maxLength")
    if least is not None or most is not None:
        parts.append(_of_length(least, most, argument.where))
    return " & ".join(parts)


def _from_pattern(pattern: Any, where: str) -> str:  # noqa: ANN401  (any JSON value)
    """A pattern of JSON Schema matches anywhere unless it is anchored."""
    if not isinstance(pattern, str):
        raise refused(where, "pattern must be a text")
    start = end = "(?s:.*)"
    if pattern.startswith("^"):
        pattern, start = pattern[1:], ""
    if _ENDS_UNESCAPED.search(pattern):
        pattern, end = pattern[:-1], ""
    return regex_terminal(f"{start}(?:{pattern}){end}")


def _of_length(least: Any, most: Any, where: str) -> str:  # noqa: ANN401  (any JSON values)
    for name, value in (("minLength", least), ("maxLength", most)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise refused(where, f"{name} must be an integer")
    first = max(0, least or 0)
    if most is not None and most < first:
        raise refused(where, f"maxLength {most} is below minLength {first}")
    return f"/(?s:.{{{first},{'' if most is None else most}}})/"
