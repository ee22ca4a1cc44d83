"""Which calls a request allows or demands: `tool_choice` in all its forms, resolved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.fields import unknown_in_object
from services.frontend.schemas.chat import ChatRequest, Tool
from services.frontend.submission import ToolChoice
from services.frontend.validation import quote

_WORDS: Final = ("none", "auto", "required")
_MODES: Final = {"auto": ToolChoice.AUTO, "required": ToolChoice.REQUIRED}
_ALLOWED: Final = "tool_choice.allowed_tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRules:
    """What may be called.

    Attributes:
        choice: Whether calls may, must or may not be.
        tools: Those that may be called.
        name: The one that must be, if one is named.
        is_restricted: Whether the request declared more tools than may be called.
    """

    choice: ToolChoice
    tools: tuple[Tool, ...] = ()
    name: str = ""
    is_restricted: bool = False


def tool_rules_of(request: ChatRequest, *, has_parser: bool) -> ToolRules:
    """The rules of a request; what fits no tool of it is refused."""
    if request.tools and not has_parser:
        raise unsupported("tools", "this server runs without a tool call parser")
    tools, choice = tuple(request.tools or ()), request.tool_choice
    if choice is None:
        return ToolRules(choice=ToolChoice.AUTO if tools else ToolChoice.NONE, tools=tools)
    if choice == "none":
        return ToolRules(choice=ToolChoice.NONE, tools=tools)
    if not isinstance(choice, str | dict):
        raise _wrong_type("tool_choice", "a string or an object")
    if isinstance(choice, str) and choice not in _WORDS:
        raise _not_one_of("tool_choice", choice, _WORDS)
    if not tools:
        raise invalid("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
    if isinstance(choice, str):
        return ToolRules(choice=_MODES[choice], tools=tools)
    return _from_object(choice, tools)


def unknown_in_choice(choice: object) -> list[str]:
    """The paths of names in a `tool_choice` that nobody knows."""
    if not isinstance(choice, dict):
        return []
    unknown = unknown_in_object(choice, ("type", str(choice.get("type"))), "tool_choice")
    unknown += unknown_in_object(choice.get("function"), ("name",), "tool_choice.function")
    allowed = choice.get("allowed_tools")
    unknown += unknown_in_object(allowed, ("mode", "tools"), _ALLOWED)
    tools = allowed.get("tools") if isinstance(allowed, dict) else None
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        where = f"{_ALLOWED}.tools[{i}]"
        unknown += unknown_in_object(tool, ("type", "function"), where)
        function = tool.get("function") if isinstance(tool, dict) else None
        unknown += unknown_in_object(function, ("name",), f"{where}.function")
    return unknown


def _from_object(choice: Mapping[str, Any], tools: Sequence[Tool]) -> ToolRules:
    kind = _text_in(choice, "tool_choice", "type")
    if kind == "function":
        name = _function_name(choice, "tool_choice")
        (tool,) = _find(name, tools, "tool_choice.function.name")
        return ToolRules(choice=ToolChoice.NAMED, tools=(tool,), name=name)
    if kind == "allowed_tools":
        return _from_allowed(choice.get("allowed_tools"), tools)
    raise _not_one_of("tool_choice.type", kind, ("function", "allowed_tools"))


def _from_allowed(allowed: object, tools: Sequence[Tool]) -> ToolRules:
    if allowed is None:
        raise _missing(_ALLOWED)
    if not isinstance(allowed, dict):
        raise _wrong_type(_ALLOWED, "an object")
    mode = _text_in(allowed, _ALLOWED, "mode")
    if mode not in _MODES:
        raise _not_one_of(f"{_ALLOWED}.mode", mode, tuple(_MODES))
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise invalid(
            f"Invalid '{_ALLOWED}.tools': expected an array of at least one tool.",
            f"{_ALLOWED}.tools",
            "empty_array" if listed == [] else "invalid_type",
        )
    names: dict[str, None] = {}
    for i, entry in enumerate(listed):
        where = f"{_ALLOWED}.tools[{i}]"
        if not isinstance(entry, dict):
            raise _wrong_type(where, "an object")
        if _text_in(entry, where, "type") != "function":
            raise invalid(f"Invalid '{where}': only functions exist.", where)
        name = _function_name(entry, where)
        _find(name, tools, f"{where}.function.name")
        names[name] = None
    kept = tuple(tool for tool in tools if tool.function.name in names)
    return ToolRules(choice=_MODES[mode], tools=kept, is_restricted=len(kept) < len(tools))


def _function_name(entry: Mapping[str, Any], where: str) -> str:
    function = entry.get("function")
    if function is None:
        raise _missing(f"{where}.function.name")
    if not isinstance(function, dict):
        raise _wrong_type(f"{where}.function", "an object")
    name = _text_in(function, f"{where}.function", "name")
    if name is None:
        raise _missing(f"{where}.function.name")
    return name


def _text_in(given: Mapping[str, Any], where: str, name: str) -> str | None:
    """A member that is a text if it is there."""
    value = given.get(name)
    if not isinstance(value, str | None):
        raise _wrong_type(f"{where}.{name}", "a string")
    return value


def _find(name: str, tools: Sequence[Tool], where: str) -> tuple[Tool]:
    for tool in tools:
        if tool.function.name == name:
            return (tool,)
    raise invalid(f"Invalid '{where}': {quote(name)} is not among the 'tools'.", where)


def _missing(where: str) -> ApiError:
    return invalid(f"Missing required parameter: '{where}'.", where, "missing_required_parameter")


def _wrong_type(where: str, expected: str) -> ApiError:
    return invalid(f"Invalid type for '{where}': expected {expected}.", where, "invalid_type")


def _not_one_of(where: str, given: object, known: Sequence[str]) -> ApiError:
    listed = ", ".join(f"'{name}'" for name in known)
    return invalid(
        f"Invalid value for '{where}': {quote(given)}. Supported values are: {listed}.", where
    )
