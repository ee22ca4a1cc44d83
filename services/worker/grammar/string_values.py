"""Raw text of a string argument: what its schema says about it, as terminals."""

import re
from collections.abc import Mapping
from typing import Any, Final

from services.worker.grammar.writer import refused, regex_terminal

FACETS: Final = ("pattern", "format", "minLength", "maxLength")

_YEAR: Final = "[1-9][0-9]{3}"
_LEAP_YEAR: Final = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE: Final = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_N: Final = "[0-9]{1,9}"
_DAYS: Final = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_HOURS: Final = f"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
# Five labels of this length stay within the 253 characters of a name.
_LABEL: Final = r"[A-Za-z0-9]([A-Za-z0-9-]{0,40}[A-Za-z0-9])?"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H: Final = "[0-9a-fA-F]{1,4}"
_IPV6: Final = "|".join(
    [
        f"({_H}:){{7}}{_H}",
        f"({_H}:){{1,7}}:",
        *(f"({_H}:){{1,{7 - n}}}(:{_H}){{1,{n}}}" for n in range(1, 7)),
        f":((:{_H}){{1,7}}|:)",
    ]
)
# Formats of JSON Schema that an expression can say.
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}({_HOURS})?|{_HOURS}|{_N}W)",
    "email": r"[A-Za-z0-9_+-]{1,24}(\.[A-Za-z0-9_+-]{1,24})?@"
    rf"{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_IPV6})",
    "uuid": r"[0-9a-fA-F]{8}-([0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": r"[a-z][a-z0-9+.-]*:[!#$&-;=?-Z_a-z~%\[\]]+",
}
_ENDS_UNESCAPED: Final = re.compile(r"(?<!\\)(\\\\)*\$\Z")


def facet_terminals(facets: Mapping[str, Any], where: str) -> list[str]:
    """What the keywords about texts of a schema say, each as a terminal.

    Raises:
        RequestError: One is what no expression can say.
    """
    parts = []
    if "pattern" in facets:
        parts.append(_from_pattern(facets["pattern"], where))
    if "format" in facets:
        found = FORMATS.get(str(facets["format"]))
        if found is None:
            raise refused(where, f"format {facets['format']!r} cannot be enforced")
        parts.append(regex_terminal(found))
    least, most = facets.get("minLength"), facets.get("maxLength")
    if least is not None or most is not None:
        parts.append(_of_length(least, most, where))
    return parts


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
