"""What becomes of body fields that no request model has: nothing is ignored silently.

A field of a known API that is not served (`not_served`) is a 400 that names it, unless its value
asks for nothing (null, or the value that means "off"). A field nobody knows is served without, and
named in the response header `x-unknown-fields`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import quote

from pydantic import BaseModel

from services.frontend.errors import unsupported

UNKNOWN_FIELDS_HEADER: Final = "x-unknown-fields"
MAX_NAMES: Final = 16
MAX_NAME_CHARS: Final = 48
_NOT_BUILT: Final = "this version does not have it"


def sort_extra(
    model: BaseModel | None, not_served: Mapping[str, tuple[object, ...]], path: str = ""
) -> list[str]:
    """Refuse the known fields among the extra ones; the paths of the unknown ones.

    Args:
        model: A parsed part of the body.
        not_served: Known names with the values that ask for nothing.
        path: Where the part stands, ending in a dot when not empty.
    """
    extra = model.model_extra if model is not None else None
    if not extra:
        return []
    unknown = []
    for name, value in extra.items():
        if name not in not_served:
            if value is not None:  # null is absent
                unknown.append(path + name)
        elif value is not None and not _asks_nothing(value, not_served[name]):
            raise unsupported(path + name, _NOT_BUILT)
    return unknown


def unknown_in_parts(
    model: BaseModel, path: str = "", *, except_for: Collection[str] = ()
) -> list[str]:
    """The paths of unknown fields in the parts of a model, at any depth; its own are not meant.

    Args:
        model: A parsed body or part of it.
        path: Where it stands, ending in a dot when not empty.
        except_for: Fields that the caller looks into by itself.
    """
    unknown: list[str] = []
    for name in type(model).model_fields:
        if name in except_for:
            continue
        for where, part in _parts_of(getattr(model, name), path + name):
            unknown += sort_extra(part, {}, f"{where}.")
            unknown += unknown_in_parts(part, f"{where}.")
    return unknown


def unknown_in_object(given: object, known: Collection[str], path: str) -> list[str]:
    """The paths of names of a JSON object that are not among the known ones."""
    names = given if isinstance(given, dict) else {}
    return [
        f"{path}.{name}" for name, value in names.items() if name not in known and value is not None
    ]


def unknown_header(names: Iterable[str]) -> dict[str, str]:
    """The warning header; names are percent-encoded, cut and counted, so any body is safe."""
    listed = list(names)
    if not listed:
        return {}
    shown = [quote(name[:MAX_NAME_CHARS], safe="[]._-") for name in listed[:MAX_NAMES]]
    if len(listed) > MAX_NAMES:
        shown.append(f"and-{len(listed) - MAX_NAMES}-more")
    return {UNKNOWN_FIELDS_HEADER: ", ".join(shown)}


def _parts_of(value: object, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, BaseModel):
                yield f"{path}[{i}]", item


def _asks_nothing(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(known) and value == known for known in harmless)
