"""From raw values to typed flags; every value without sense becomes a line that names it."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from services.launcher.options.environment import LEGACY, legacy_keys
from services.launcher.options.fields import (
    OpenOptions,
    Path,
    dotted,
    drop,
    known_keys,
    mistakes,
    near,
    spelled,
)
from services.launcher.options.serve import JSON_FLAGS, ServeOptions
from shared.config import flag_of

_EXTRA: Final = "additional_config"
# Keys that newer guides write inside scheduler_config, where they win.
_MOVED: Final = (
    "enable_balance_scheduling",
    "recompute_scheduler_enable",
    "profiling_chunk_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Typed flags.

    Attributes:
        flags: What was given, less what has no sense.
        origins: Path -> name under which it was given, where that is not the path's own.
        problems: Values without sense.
        lines: What has sense but must be told.
    """

    flags: ServeOptions
    origins: Mapping[str, str]
    problems: tuple[str, ...]
    lines: tuple[str, ...]


def build(values: Mapping[str, Any], variables: Mapping[str, str]) -> Built:
    """Type the values of a command line and of the variables that stand for keys."""
    raw = copy.deepcopy(dict(values))
    origins, lines = _merge(raw, variables)
    problems: list[str] = []
    flags = _typed(raw, origins, problems)
    lines += _unknown_keys(flags)
    lines += _texts_as_truth(flags, raw)
    return Built(flags=flags, origins=origins, problems=tuple(problems), lines=tuple(lines))


def _merge(raw: dict[str, Any], variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Bring every spelling of a key to the outer one."""
    origins: dict[str, str] = {}
    lines: list[str] = []
    extra = raw.get(_EXTRA, {})
    inner = extra.get("scheduler_config")
    for key in _MOVED:
        if not isinstance(inner, dict) or key not in inner:
            continue
        if key in extra and extra[key] != inner[key]:
            outer, winner = spelled(extra[key]), spelled(inner[key])
            lines.append(
                f"--additional-config {key}={outer}: no effect: "
                f"scheduler_config.{key}={winner} wins"
            )
        extra[key] = inner.pop(key)
        origins[f"{_EXTRA}.{key}"] = f"--additional-config scheduler_config.{key}"
    for key, variable in legacy_keys(variables).items():
        if key in extra:
            lines.append(f"{variable}: no effect: --additional-config {key} wins")
            continue
        extra[key] = variables[variable]
        raw[_EXTRA] = extra
        origins[f"{_EXTRA}.{key}"] = variable
    return origins, lines


def _typed(raw: dict[str, Any], origins: Mapping[str, str], problems: list[str]) -> ServeOptions:
    """The model, once everything that it refuses is put aside; ends, as each round drops some."""
    dropped: set[Path] = set()
    while True:
        try:
            return ServeOptions(**raw)
        except ValidationError as error:
            places: set[Path] = set()
            for path, value, why in mistakes(ServeOptions, error):
                if path[:2] not in dropped:  # else it is missed after its value had no sense
                    problems.append(_problem(path, value, why, origins))
                places.add(path[:2])
            for place in places:
                if place[0] in raw:
                    drop(raw, place)
            dropped |= places


def _problem(path: Path, value: object, why: str, origins: Mapping[str, str]) -> str:
    flag, inner = str(path[0]), path[1:]
    origin = origins.get(dotted(path))
    if origin is not None:
        return f"{origin}={spelled(value)}: {why}"
    if not inner:
        shown = "" if flag in JSON_FLAGS else f" {spelled(value)}"
        return f"{flag_of(flag)}{shown}: {why}"
    if why == "field required":
        return f"{flag_of(flag)}: {dotted(inner)} is required"
    return f"{flag_of(flag)}: {dotted(inner)} {spelled(value)}: {why}"


def _groups(flags: ServeOptions) -> Iterator[tuple[Path, BaseModel]]:
    """Every group with its place."""
    pending: list[tuple[Path, object]] = [((), flags)]
    while pending:
        path, found = pending.pop(0)
        if isinstance(found, BaseModel):
            yield path, found
            pending += [((*path, name), getattr(found, name)) for name in found.model_fields_set]
        elif isinstance(found, list | tuple):
            pending += [((*path, number), item) for number, item in enumerate(found)]


def _unknown_keys(flags: ServeOptions) -> Iterator[str]:
    for path, group in _groups(flags):
        if not isinstance(group, OpenOptions):
            continue
        known = known_keys(type(flags.additional_config)) | known_keys(type(group))
        for key in group.model_extra or {}:
            place = dotted((*path[1:], key))
            yield f"{flag_of(str(path[0]))} {place}: unknown key, ignored{near(key, known)}"


def _texts_as_truth(flags: ServeOptions, raw: Mapping[str, Any]) -> Iterator[str]:
    """Switches given as text: upstream takes any text for true, even "False"."""
    for path, group in _groups(flags):
        if not path:
            continue
        for name in group.model_fields_set:
            given = _at(raw, (*path, name))
            value = getattr(group, name)
            variable = name in LEGACY.values() and path == (_EXTRA,)
            if isinstance(value, bool) and isinstance(given, str) and not variable:
                place = dotted((*path[1:], name))
                now = spelled(value)
                yield f'{flag_of(str(path[0]))} {place}: the text "{given}" is read as {now}'


def _at(raw: object, path: Path) -> object:
    for part in path:
        try:
            raw = raw[part]  # type: ignore[index]  # a group of raw JSON, by its place
        except (KeyError, IndexError, TypeError):
            return None
    return raw
