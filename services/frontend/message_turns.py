"""Turns of the Messages API as chat messages.

A turn of the user may hold results of calls, which are messages of their own in a chat, and text. A
turn of the assistant is one message: its thinking, its text, its calls.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from services.frontend.errors import invalid, unsupported
from services.frontend.response_items import ChatMessages
from services.frontend.schemas.messages import BLOCK_TYPES
from services.frontend.validation import quote

# Kinds of blocks of the API that no text model reads, or that tools at a provider make.
OTHER_BLOCK_TYPES: Final = frozenset(
    {
        "bash_code_execution_tool_result", "code_execution_tool_result", "container_upload",
        "document", "image", "mid_conv_system", "search_result", "server_tool_use",
        "text_editor_code_execution_tool_result", "tool_search_tool_result",
        "web_fetch_tool_result", "web_search_tool_result",
    }
)  # fmt: skip


def check_block_types(messages: object) -> None:
    """Refuse kinds of blocks that this server does not know, by name."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for j, block in enumerate(content if isinstance(content, list) else ()):
            kind = block.get("type") if isinstance(block, dict) else "text"
            where = f"messages[{i}].content[{j}].type"
            if isinstance(kind, str) and kind in OTHER_BLOCK_TYPES:
                raise unsupported(where, f"blocks of type {quote(kind)} are not served")
            if kind is not None and kind not in BLOCK_TYPES:
                raise invalid(
                    f"Invalid value for '{where}': {quote(kind)}. Supported values are: "
                    f"{', '.join(map(repr, BLOCK_TYPES))}.",
                    where,
                )


def messages_of(
    turns: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]] | None
) -> tuple[ChatMessages, list[str]]:
    """Checked turns as chat messages, and the paths of blocks that are left out."""
    chat, left_out = ChatMessages(), list[str]()
    if system:
        chat.add({"role": "system", "content": text_of(system, "\n\n")}, "system")
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        if turn["role"] == "assistant":
            left_out += _add_assistant(chat, turn["content"], where)
        else:
            _add_other(chat, turn["role"], turn["content"], where)
    return chat, left_out


def text_of(content: str | Sequence[Mapping[str, Any]] | None, separator: str = "") -> str:
    """The text of a string or of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    return separator.join(str(block["text"]) for block in content)


def _add_other(chat: ChatMessages, role: str, content: Any, where: str) -> None:  # noqa: ANN401
    """A turn of the user: results first, as a chat wants them, then its text."""
    if isinstance(content, str):
        chat.add({"role": role, "content": content}, f"{where}.content")
        return
    if not content:
        raise invalid(
            f"Invalid '{where}.content': expected at least one block.",
            f"{where}.content",
            "empty_array",
        )
    texts: list[str] = []
    for j, block in enumerate(content):
        path = f"{where}.content[{j}]"
        kind = block["type"]
        if kind == "text":
            texts.append(block["text"])
        elif kind == "tool_result" and role == "user":
            _refuse_late(texts, path)
            answer = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            chat.add({**answer, "content": _result(block)}, path)
        else:
            raise invalid(
                f"Invalid '{path}.type': a {role} turn has no such block.", f"{path}.type"
            )
    if texts:
        chat.add({"role": role, "content": "".join(texts)}, f"{where}.content")


def _refuse_late(texts: Sequence[str], path: str) -> None:
    if texts:
        raise invalid(
            f"Invalid '{path}.type': 'tool_result' blocks come before the text of a turn.",
            f"{path}.type",
        )


def _result(block: Mapping[str, Any]) -> str:
    """What a call gave; the dialect has no flag for errors, so the text has to say it."""
    text = text_of(block.get("content"))
    is_told = text.lstrip().lower().startswith("error")
    return f"Error: {text}" if block.get("is_error") and not is_told else text


def _add_assistant(chat: ChatMessages, content: Any, where: str) -> list[str]:  # noqa: ANN401
    message: dict[str, Any] = {"role": "assistant", "content": None}
    left_out: list[str] = []
    if isinstance(content, str):
        message["content"] = content
        content = ()
    texts = [block["text"] for block in content if block["type"] == "text"]
    thoughts = [block["thinking"] for block in content if block["type"] == "thinking"]
    calls = [_call(block) for block in content if block["type"] == "tool_use"]
    for j, block in enumerate(content):
        path = f"{where}.content[{j}]"
        if block["type"] == "redacted_thinking":
            left_out.append(path)
        elif block["type"] == "tool_result":
            raise invalid(f"Invalid '{path}.type': only a user turn has results.", f"{path}.type")
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    chat.add(message, where)
    return left_out


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}
