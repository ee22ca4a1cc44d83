"""The form that a request asks of its text, in each of the ways that clients know.

`response_format` is OpenAI's, `structured_outputs` vLLM's, and `guided_*` what came before it. A
request has one of them at most. Only the shape is checked here; what a schema or a grammar means
the worker says.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from services.frontend.errors import ApiError, invalid
from services.frontend.fields import unknown_in_object
from services.frontend.schemas.fields import GenerationFields
from services.frontend.validation import check_depth, quote
from shared.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, FormatKind, TextFormat

_TYPES: Final = ("text", "json_object", "json_schema", "structural_tag")
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SCHEMA: Final = "response_format.json_schema"
_MEMBERS: Final = ("type", "json_schema")
_SCHEMA_MEMBERS: Final = ("name", "description", "schema", "strict")


def text_format_of(request: GenerationFields) -> tuple[TextFormat | None, str]:
    """The form, None for any text, and the field that asks for it."""
    found = {name: read for name, read in _found(request).items() if read is not None}
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        raise invalid(f"{names} exclude each other.", list(found)[1])
    for name, given in found.items():
        if given.num_bytes > MAX_CONSTRAINT_BYTES:
            raise invalid(
                f"Invalid '{name}': {given.num_bytes} bytes are more than {MAX_CONSTRAINT_BYTES}.",
                name,
            )
        return given, name
    return None, ""


def unknown_in_format(given: Mapping[str, Any] | None) -> list[str]:
    """The paths of names in `response_format` that nobody knows; of a tag the worker says."""
    kind = (given or {}).get("type")
    if kind == "structural_tag":
        return []
    known = _MEMBERS if kind == "json_schema" else _MEMBERS[:1]
    unknown = unknown_in_object(given, known, "response_format")
    schema = (given or {}).get("json_schema") if kind == "json_schema" else None
    return unknown + unknown_in_object(schema, _SCHEMA_MEMBERS, _SCHEMA)


def _found(request: GenerationFields) -> dict[str, TextFormat | None]:
    return {
        "response_format": _from_response_format(request.response_format),
        "structured_outputs": _from_structured_outputs(request),
        **_from_guided(request),
    }


# ---- response_format ----


def _from_response_format(given: Mapping[str, Any] | None) -> TextFormat | None:
    if given is None:
        return None
    kind = given.get("type")
    if "type" not in given:
        raise _missing("response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return TextFormat(kind=FormatKind.JSON_OBJECT)
    if kind == "json_schema":
        return _from_json_schema(given.get("json_schema"))
    if kind == "structural_tag":
        return _structural_tag(given, "response_format")
    listed = ", ".join(f"'{name}'" for name in _TYPES)
    raise invalid(
        f"Invalid value for 'response_format.type': {quote(kind)}. Supported values are: {listed}.",
        "response_format.type",
    )


def _from_json_schema(given: object) -> TextFormat:
    if given is None:
        raise _missing(_SCHEMA)
    if not isinstance(given, dict):
        raise _wrong_type(_SCHEMA, "an object")
    name, strict = given.get("name"), given.get("strict")
    if name is None:
        raise _missing(f"{_SCHEMA}.name")
    if not isinstance(name, str):
        raise _wrong_type(f"{_SCHEMA}.name", "a string")
    if not isinstance(strict, bool | None):
        raise _wrong_type(f"{_SCHEMA}.strict", "a boolean")
    if given.get("schema") is None:
        raise _missing(f"{_SCHEMA}.schema")
    text = _schema_text(given["schema"], f"{_SCHEMA}.schema")
    return TextFormat(kind=FormatKind.JSON_SCHEMA, text=text, is_strict=bool(strict))


# ---- structured_outputs ----


def _from_structured_outputs(request: GenerationFields) -> TextFormat | None:
    given, where = request.structured_outputs, "structured_outputs"
    if given is None:
        return None
    values = {name: getattr(given, "json_" if name == "json" else name) for name in _KINDS}
    # A json_object of false asks for nothing.
    asked = [name for name, value in values.items() if value not in (None, False)]
    if len(asked) != 1:
        what = " and ".join(f"'{name}'" for name in asked) if asked else "none"
        raise invalid(
            f"Invalid '{where}': expected exactly one of {', '.join(_KINDS)}, got {what}.", where
        )
    form = _of_kind(asked[0], values[asked[0]], f"{where}.{asked[0]}")
    if given.disable_additional_properties:
        form = _closed(form, where)
    return _spaced(form, not given.disable_any_whitespace, given.whitespace_pattern or "")


def _from_guided(request: GenerationFields) -> dict[str, TextFormat | None]:
    """The older names."""
    names = ("json", "regex", "choice", "grammar")
    given = {f"guided_{kind}": getattr(request, f"guided_{kind}") for kind in names}
    pattern = request.guided_whitespace_pattern
    found = {
        name: _spaced(_of_kind(kind, given[name], name), has_whitespace=True, pattern=pattern or "")
        for kind, name in zip(names, given, strict=True)
        if given[name] is not None
    }
    if pattern is not None and "guided_json" not in found:
        raise invalid(
            "'guided_whitespace_pattern' is only allowed with 'guided_json'.",
            "guided_whitespace_pattern",
        )
    return dict(found)


def _of_kind(kind: str, value: Any, where: str) -> TextFormat:  # noqa: ANN401  (any JSON value)
    if kind == "json":
        return TextFormat(kind=FormatKind.JSON_SCHEMA, text=_schema_text(value, where))
    if kind == "json_object":
        return TextFormat(kind=FormatKind.JSON_OBJECT)
    if kind == "structural_tag":
        return _structural_tag(_decoded(value, where), where)
    if kind == "choice":
        return _choice(value, where)
    if not value:
        raise invalid(f"Invalid '{where}': it is empty.", where, "empty_string")
    named = FormatKind.REGEX if kind == "regex" else FormatKind.GRAMMAR
    return TextFormat(kind=named, text=value)


def _choice(value: list[str], where: str) -> TextFormat:
    if not value:
        raise invalid(f"Invalid '{where}': empty array.", where, "empty_array")
    if len(value) > MAX_CHOICES:
        raise invalid(
            f"Invalid '{where}': expected at most {MAX_CHOICES} texts, got {len(value)}.",
            where,
            "array_above_max_length",
        )
    if "" in value:
        place = f"{where}[{value.index('')}]"
        raise invalid(f"Invalid '{place}': it is empty.", place, "empty_string")
    return TextFormat(kind=FormatKind.CHOICE, choices=tuple(value))


def _structural_tag(given: Any, where: str) -> TextFormat:  # noqa: ANN401  (any JSON value)
    if not isinstance(given, dict):
        raise _wrong_type(where, "an object")
    check_depth(given, where)
    return TextFormat(kind=FormatKind.STRUCTURAL_TAG, text=_text_of(given))


# ---- schemas ----


def _schema_text(value: Any, where: str) -> str:  # noqa: ANN401  (any JSON value)
    """A schema, given as JSON or as the text of it."""
    schema = _decoded(value, where)
    if not isinstance(schema, dict | bool):
        raise _wrong_type(where, "a JSON Schema")
    check_depth(schema, where)
    return _text_of(schema)


def _decoded(value: Any, where: str) -> Any:  # noqa: ANN401  (any JSON value)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise invalid(f"Invalid '{where}': not JSON: {error}.", where, "invalid_json") from None


def _closed(form: TextFormat, where: str) -> TextFormat:
    """No object may have more than its declared properties."""
    if form.kind is not FormatKind.JSON_SCHEMA:
        path = f"{where}.disable_additional_properties"
        raise invalid(f"'{path}' is only allowed with '{where}.json'.", path)
    schema = json.loads(form.text)
    pending = [schema]
    for node in pending:  # grows while it runs
        if isinstance(node, dict):
            if "properties" in node:
                node.setdefault("additionalProperties", False)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return TextFormat(kind=form.kind, text=_text_of(schema))


def _spaced(form: TextFormat, has_whitespace: bool, pattern: str) -> TextFormat:
    return TextFormat(
        kind=form.kind,
        text=form.text,
        choices=form.choices,
        is_strict=form.is_strict,
        has_whitespace=has_whitespace,
        whitespace_pattern=pattern,
    )


def _text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _missing(where: str) -> ApiError:
    return invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")


def _wrong_type(where: str, expected: str) -> ApiError:
    return invalid(f"Invalid type for '{where}': expected {expected}.", where, "invalid_type")
