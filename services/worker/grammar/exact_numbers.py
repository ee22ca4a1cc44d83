"""Numbers of a schema as the engine holds them: as doubles, read with a last bit that may be off.

A bound is moved inwards where it has to be, so whatever is written fits the schema, though a few
values beside the bound may never be. A listed number that cannot be kept is refused.
"""

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from services.worker.grammar.writer import refused

# Of bounds; ranges are those of 64-bit integers.
_LARGEST: Final = 9 * 10**18
_INT64: Final = 2**63
# What is written where zero itself is left out: with that as a bound the engine still writes it.
_NEXT_TO_ZERO: Final = 1e-12
_DIGITS_BELOW: Final = 6
_MAX_SHOWN: Final = 40
# By side, the sign that makes the bound a lower one.
_SIDES: Final[Mapping[str, int]] = {
    **{"minimum": 1, "exclusiveMinimum": 1},
    **{"maximum": -1, "exclusiveMaximum": -1},
}


def exact_numbers(schema: dict[str, Any], where: str) -> dict[str, Any]:
    """One schema, its sub-schemas aside, such that nothing is written that does not fit it.

    Raises:
        RequestError: A number cannot be kept.
    """
    for name in ("enum", "const", "multipleOf"):
        if name in schema:
            _check_listed(schema[name], name, where)
    if not schema.keys() & _SIDES.keys():
        return schema
    moved = _without_zero(_without_flags(schema))
    for name, sign in _SIDES.items():
        if name in moved:
            found = _inwards(sign * moved[name])
            if found is None:
                shown = str(moved[name])[:_MAX_SHOWN]
                raise refused(where, f"{name} {shown} is beyond {sign * _LARGEST}")
            moved[name] = sign * found
    return moved


def _check_listed(value: Any, name: str, where: str) -> None:  # noqa: ANN401  (any JSON value)
    pending = [value]
    for each in pending:  # grows while it runs
        if isinstance(each, Mapping):
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)
        elif isinstance(each, int | float) and not _is_kept(each):
            shown = str(each) if abs(each) < _INT64 else f"{str(each)[:_MAX_SHOWN]}..."
            text = f"{shown} of {name} cannot be kept: integers can up to 2^53, others to 15 digits"
            raise refused(where, text)


def _is_kept(number: float) -> bool:
    """Whether the engine reads the same number."""
    if isinstance(number, int):
        return abs(number) < _INT64 and int(float(number)) == number
    if not math.isfinite(number):
        return False
    # It takes the digits as an integer, and that times or by a power of ten: rounded twice.
    _, digits, exponent = Decimal(repr(abs(number))).as_tuple()
    whole = float("".join(map(str, digits)))
    power = float(f"1e{abs(int(exponent))}")
    read = whole * power if int(exponent) > 0 else whole / power
    return read == abs(number)


def _without_flags(schema: dict[str, Any]) -> dict[str, Any]:
    """Exclusive bounds as numbers; draft 4 says by a boolean that the other one is exclusive."""
    found = dict(schema)
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = found.get(exclusive)
        if isinstance(flag, bool):
            del found[exclusive]
            if flag and name in found:
                found[exclusive] = found.pop(name)
    return found


def _without_zero(schema: dict[str, Any]) -> dict[str, Any]:
    """Numbers above or below zero as numbers from the next one on."""
    if schema.get("type") == "integer":
        return schema
    for side, other, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        if schema.get(f"exclusive{side}") != 0:
            continue
        del schema[f"exclusive{side}"]
        ends = [
            sign * schema[name] for name in (f"exclusive{other}", other.lower()) if name in schema
        ]
        next_one = sign * _next_to_zero(min((end for end in ends if end > 0), default=1))
        own = schema.get(side.lower(), next_one)
        schema[side.lower()] = max(own, next_one) if sign > 0 else min(own, next_one)
    return schema


def _next_to_zero(end: float) -> float:
    """A number that is small beside the other end of the range."""
    power = math.floor(math.log10(end)) - _DIGITS_BELOW
    return min(_NEXT_TO_ZERO, float(f"1e{power}") or end)


def _inwards(bound: float) -> float | None:
    """The first number from a lower bound on that the engine keeps; None beyond all of them."""
    if bound > _LARGEST:
        return None
    if bound < -_LARGEST:
        return -_LARGEST
    if isinstance(bound, int):
        near = float(bound)
        return int(near if near >= bound else math.nextafter(near, math.inf))
    while not _is_kept(bound):  # every other one or so is
        bound = math.nextafter(bound, math.inf)
    return bound
