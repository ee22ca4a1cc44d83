"""Chat messages as clients send them -> messages as a chat template expects them.

developer and system are one role, text parts are joined in order, an absent content is an empty
text, reasoning goes by one name, tool arguments are objects. Every refusal names the message.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import FailureReason, RequestError
from shared.json_limits import is_portable

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# Parts that are no text but that the template has words for.
_TEMPLATE_PARTS = frozenset(
    {"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"}
)
# The form in which GLM shows its reasoning; honoured only at the head of an assistant message.
_THINK, _END_THINK = "<think>", "</think>"
# Name of the one argument that stands for arguments which are no JSON object.
_RAW_ARGUMENTS = "arguments"


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All messages in order, none dropped; `RequestError` for one that cannot be shown."""
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def invalid(field: str, message: str) -> RequestError:
    """The refusal of one field."""
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def _normalize(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid(where, "must be an object")
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    result: dict[str, Any] = {"role": role, "content": _content(message, role, where)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if role == "assistant":
        _add_reasoning(result, message, where)
        calls = _tool_calls(message, where)
        if calls:
            result["tool_calls"] = calls
    return result


def _content(message: Mapping[str, Any], role: str, where: str) -> str | list[Any]:
    content = message.get("content")
    if content is None:
        if role == "assistant":
            return ""
        raise invalid(f"{where}.content", "is missing")
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise invalid(f"{where}.content", "must be a string or a list of parts")
    parts = [_part(part, role, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if all(isinstance(part, str) for part in parts):
        return "".join(parts)
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]


def _part(part: Any, role: str, where: str) -> Any:  # noqa: ANN401  (any JSON value)
    """A text part as its text, any other part that the template knows as it is."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise invalid(where, "must be an object")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(f"{where}.text", "must be a string")
        return text
    is_tool_part = role == "tool" and (kind == "tool_reference" or "output" in part)
    if kind in _TEMPLATE_PARTS or is_tool_part:
        return dict(part)
    raise invalid(f"{where}.type", "is not a part that this model can read")


def _add_reasoning(result: dict[str, Any], message: Mapping[str, Any], where: str) -> None:
    for name in ("reasoning_content", "reasoning"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{where}.{name}", "must be a string")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = result["content"]
    if not reasoning and isinstance(content, str):
        reasoning, result["content"] = _split_reasoning(content)
    if reasoning:
        result["reasoning_content"] = reasoning


def _split_reasoning(content: str) -> tuple[str | None, str]:
    head = content.lstrip()
    if not head.startswith(_THINK):
        return None, content
    reasoning, found, rest = head[len(_THINK) :].partition(_END_THINK)
    return (reasoning, rest) if found else (None, content)


def _tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise invalid(f"{where}.tool_calls", "must be a list")
    result = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    legacy = message.get("function_call")
    if legacy and not result:
        result.append(_tool_call({"function": legacy}, f"{where}.function_call"))
    return result


def _tool_call(call: Any, where: str) -> dict[str, Any]:  # noqa: ANN401  (any JSON value)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise invalid(f"{where}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.function.name", "must be a string that is not empty")
    arguments = parse_arguments(function.get("arguments"))
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def parse_arguments(arguments: Any) -> dict[str, Any]:  # noqa: ANN401  (any JSON value)
    """Arguments of a call in the history as an object, keys in their order.

    Blank arguments are none. Text that is no JSON object (a call that was cut off, say), or that
    no template can write, is shown whole, as one argument named "arguments": the conversation
    stays usable and nothing is lost.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            return {_RAW_ARGUMENTS: arguments}
        if not is_portable(value):
            return {_RAW_ARGUMENTS: arguments}
    return dict(value) if isinstance(value, Mapping) else {_RAW_ARGUMENTS: value}


def _refuse(name: str) -> Any:  # noqa: ANN401  (never returns)
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
