"""How values of options are read: numbers, switches, JSON; and how a mistake in one is told.

A mistake never ends the reading: the value is put aside with a line that names its flag and key, so
that one start tells all of them.
"""

import difflib
import json
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any, NoReturn, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.errors import ConfigError


class Options(BaseModel):
    """A group of options; a key outside it is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class OpenOptions(Options):
    """A group whose unknown keys are kept, to be told, and otherwise ignored.

    Newer guides name keys that we do not know; their deployments still have to start.
    """

    model_config = ConfigDict(extra="allow")


def _no_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")  # noqa: TRY004  # for pydantic
    return value


Whole = Annotated[int, BeforeValidator(_no_truth)]
Size = Annotated[Whole, Field(ge=1)]
Index = Annotated[Whole, Field(ge=0)]
Port = Annotated[Whole, Field(ge=1, le=65535)]
# Connectors write ports as numbers and as text.
PortBase = Annotated[Whole, Field(ge=0, le=65535)]

Path = tuple[str | int, ...]


def read_json(flag: str, text: str) -> dict[str, Any]:
    """The JSON object that a flag was given.

    Raises:
        ConfigError: It is no JSON, no object, or names a key twice.
    """

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{flag}: {key} is given twice")
            found[key] = value
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise ConfigError(f"{flag}: {name} is no JSON number")

    try:
        content = json.loads(text, object_pairs_hook=collect, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{flag}: no JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} {text.strip()[:40]}: must be a JSON object")
    return content


def spelled(value: object) -> str:
    """A value as it is written in JSON; a word without quotes."""
    if isinstance(value, str):
        return value
    if isinstance(value, frozenset | set):
        value = sorted(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, separators=(",", ":"), default=str)


def dotted(path: Path) -> str:
    """`("connectors", 0, "kv_role")` as `connectors[0].kv_role`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def mistakes(model: type[Options], error: ValidationError) -> Iterator[tuple[Path, object, str]]:
    """Each mistake as (where, what was given, why)."""
    for problem in error.errors():
        path = problem["loc"]
        if problem["type"] == "extra_forbidden":
            why = f"no key that is read here{near(str(path[-1]), known_keys(model))}"
        else:
            why = problem["msg"].removeprefix("Value error, ")
        yield path, problem["input"], why[:1].lower() + why[1:]


def near(name: str, known: frozenset[str]) -> str:
    """A hint at the name that looks most alike."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def known_keys(model: type[Options]) -> frozenset[str]:
    """All keys of a group and of the groups inside it."""
    keys: set[str] = set()
    pending = [model]
    seen: set[type[Options]] = set()
    while pending:
        group = pending.pop()
        if group in seen:
            continue
        seen.add(group)
        for name, field in group.model_fields.items():
            keys.add(name)
            pending += groups_in(field.annotation)
    return frozenset(keys)


def groups_in(annotation: object) -> list[type[Options]]:
    """The groups that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return [annotation]
    return [group for part in get_args(annotation) for group in groups_in(part)]


def drop(content: MutableMapping[str, Any], path: Path) -> None:
    """Put a wrong value aside: a flag, or one key of a flag with all that is inside it.

    A key that is missing has a place, too: then the whole flag goes.
    """
    group = content[str(path[0])]
    if len(path) > 1 and isinstance(group, dict) and path[1] in group:
        del group[path[1]]
    else:
        del content[str(path[0])]
