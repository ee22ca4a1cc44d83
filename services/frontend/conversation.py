"""The rules of a message list and its tools, beyond the types of single fields.

As in OpenAI's API: who speaks needs a text, a tool message answers a call of the assistant message
before it, every call is answered before somebody else speaks. Assistant messages that a server
produced (no content, cut arguments) are always taken back.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.fields import sort_extra, unknown_in_parts
from services.frontend.not_served import MESSAGE_NOT_SERVED
from services.frontend.schemas.chat import ChatMessage, ChatRequest, RefusalPart, Tool
from services.frontend.submission import DeclaredTool
from services.frontend.validation import check_depth, quote
from shared.glm.dialect import Dialect
from shared.glm.thinking import EFFORTS, thinking_arguments

_RESERVED_ARGUMENTS: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"}
)


def check_messages(messages: Sequence[ChatMessage], raw: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refuse the first message that breaks a rule; the paths of unknown fields."""
    unknown: list[str] = []
    calls: set[str] = set()
    unanswered: set[str] = set()
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        unknown += sort_extra(message, MESSAGE_NOT_SERVED, where + ".")
        unknown += unknown_in_parts(message, where + ".")
        if message.role == "tool":
            _check_answer(message, where, calls)
            unanswered.discard(str(message.tool_call_id))
        else:
            _refuse_unanswered(unanswered, where)
            calls = {call.id for call in message.tool_calls or ()}
            unanswered = set(calls)
        _check_parts(message, raw[i], where)
    _refuse_unanswered(unanswered, f"messages[{len(messages) - 1}]")
    return unknown


def readable(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checked message as the template reads it: a refusal is what the assistant said."""
    content, refusal = message.get("content"), message.get("refusal")
    parts = content if isinstance(content, list) else []
    if not refusal and not any(part["type"] == "refusal" for part in parts):
        return message
    text = text_of(content) + (refusal or "")
    return {**message, "content": text}


def text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a checked content, refusals included."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["refusal" if part["type"] == "refusal" else "text"] for part in content)


def check_tools(tools: Sequence[Tool] | None, raw: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse doubled names and schemas that nest too deep."""
    names: set[str] = set()
    for i, (tool, source) in enumerate(zip(tools or (), raw or (), strict=True)):
        name = tool.function.name
        if name in names:
            raise invalid(
                f"Invalid 'tools[{i}].function.name': {quote(name)} is declared twice.",
                f"tools[{i}].function.name",
            )
        names.add(name)
        check_depth(source, f"tools[{i}]")


def declared_tools(tools: Sequence[Tool] | None) -> tuple[DeclaredTool, ...]:
    """Names and schemas for the parser of the output."""
    return tuple(
        DeclaredTool(
            name=tool.function.name,
            parameters_json=b""
            if tool.function.parameters is None
            else msgspec.json.encode(tool.function.parameters),
        )
        for tool in tools or ()
    )


def template_arguments(request: ChatRequest, dialect: Dialect) -> tuple[dict[str, Any], list[str]]:
    """Arguments of the template, and the paths of those that it does not read."""
    given = dict(request.chat_template_kwargs or {})
    if "thinking" in given:
        raise unsupported("chat_template_kwargs.thinking", "use enable_thinking")
    for name in sorted(_RESERVED_ARGUMENTS & given.keys()):
        raise unsupported(f"chat_template_kwargs.{name}", "it belongs to the request itself")
    for name in ("enable_thinking", "clear_thinking"):
        if not isinstance(given.get(name), bool | None):
            raise _wrong_argument(name, "a boolean")
    effort = given.get("reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise _wrong_argument("reasoning_effort", f"one of {', '.join(EFFORTS)}")
    arguments = thinking_arguments(
        {name: value for name, value in given.items() if value is not None},
        reasoning_effort=request.reasoning_effort,
        thinking=request.thinking.model_dump(exclude_none=True) if request.thinking else None,
    )
    known = dialect.template_argument_names
    unknown = [f"chat_template_kwargs.{name}" for name in given if name not in known]
    return {name: value for name, value in arguments.items() if name in known}, unknown


def _wrong_argument(name: str, expected: str) -> ApiError:
    path = f"chat_template_kwargs.{name}"
    return invalid(f"Invalid '{path}': expected {expected}.", path, "invalid_type")


def _check_answer(message: ChatMessage, where: str, calls: set[str]) -> None:
    if message.tool_call_id is None:
        raise invalid(
            f"Missing required parameter: '{where}.tool_call_id'.",
            f"{where}.tool_call_id",
            "missing_required_parameter",
        )
    if not calls:
        raise invalid(
            f"Invalid '{where}.role': a message with role 'tool' must follow an assistant message "
            "with 'tool_calls'.",
            f"{where}.role",
        )
    if message.tool_call_id not in calls:
        raise invalid(
            f"Invalid '{where}.tool_call_id': {quote(message.tool_call_id)} is not among the "
            "'tool_calls' of the assistant message before it.",
            f"{where}.tool_call_id",
        )


def _refuse_unanswered(unanswered: set[str], where: str) -> None:
    if unanswered:
        listed = ", ".join(quote(call_id) for call_id in sorted(unanswered)[:8])
        raise invalid(
            f"Invalid '{where}.role': an assistant message with 'tool_calls' must be followed by "
            f"tool messages that answer each 'tool_call_id'; not answered: {listed}.",
            f"{where}.role",
        )


def _check_parts(message: ChatMessage, raw: Mapping[str, Any], where: str) -> None:
    if message.content is None and message.role != "assistant":
        if "content" in raw:
            raise invalid(
                f"Invalid type for '{where}.content': expected a string or an array, got null "
                "instead.",
                f"{where}.content",
                "invalid_type",
            )
        raise invalid(
            f"Missing required parameter: '{where}.content'.",
            f"{where}.content",
            "missing_required_parameter",
        )
    if message.content == [] and message.role not in ("assistant", "tool"):
        raise invalid(
            f"Invalid '{where}.content': empty array. Expected at least 1 element(s).",
            f"{where}.content",
            "empty_array",
        )
    for name in ("tool_calls", "reasoning", "reasoning_content", "refusal"):
        if getattr(message, name) and message.role != "assistant":
            raise _only_of_assistants(f"{where}.{name}")
    for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if isinstance(part, RefusalPart) and message.role != "assistant":
            raise _only_of_assistants(f"{where}.content[{j}]")


def _only_of_assistants(path: str) -> ApiError:
    return invalid(f"Invalid '{path}': only an assistant message has it.", path)
