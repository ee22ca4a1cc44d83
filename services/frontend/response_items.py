"""Input items of the Responses API as chat messages.

What belongs to one assistant turn (thinking, a text, calls) becomes one message. Each message knows
which item it came from, so that an error can name that.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.schemas.responses import ITEM_TYPES, OTHER_ITEM_TYPES
from services.frontend.validation import quote

# How the detokenizer begins the reasoning that a client carries.
SEAL: Final = "glm1:"


@dataclass(slots=True)
class ChatMessages:
    """Chat messages and the paths of the items they came from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    _turn: dict[str, Any] = field(default_factory=dict)
    _turn_origin: str = ""

    def add(self, message: dict[str, Any], origin: str) -> None:
        """One more message of somebody else than the assistant."""
        self.end_turn()
        self.messages.append(message)
        self.origins.append(origin)

    def turn(self, item: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """The assistant's turn that an item belongs to."""
        if not _goes_on(self._turn, item):
            self.end_turn()
        if not self._turn:
            self._turn = {"role": "assistant", "content": None}
            self._turn_origin = origin
        return self._turn

    def end_turn(self) -> None:
        """The assistant has said what it had to say."""
        if self._turn:
            self.messages.append(self._turn)
            self.origins.append(self._turn_origin)
            self._turn = {}


def check_item_types(given: object) -> None:
    """Refuse kinds of items that this server does not know, by name."""
    for i, item in enumerate(given if isinstance(given, list) else ()):
        kind = item.get("type") if isinstance(item, dict) else None
        if kind is None or kind in ITEM_TYPES:
            continue
        if isinstance(kind, str) and kind in OTHER_ITEM_TYPES:
            raise unsupported(f"input[{i}].type", f"items of type {quote(kind)} are not served")
        raise invalid(
            f"Invalid value for 'input[{i}].type': {quote(kind)}. Supported values are: "
            f"{', '.join(map(repr, ITEM_TYPES))}.",
            f"input[{i}].type",
        )


def items_of(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as items."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [dict(item) for item in given]


def messages_of(
    items: Sequence[Mapping[str, Any]], *, instructions: str | None, num_stored: int
) -> ChatMessages:
    """Checked items as chat messages.

    Args:
        items: Those of earlier responses first.
        instructions: Said before everything.
        num_stored: How many items are earlier ones.
    """
    chat = ChatMessages()
    if instructions:
        chat.add({"role": "system", "content": instructions}, "instructions")
    for position, item in enumerate(items):
        own = position - num_stored
        _add(chat, item, f"input[{own}]" if own >= 0 else "previous_response_id")
    chat.end_turn()
    return chat


def _add(chat: ChatMessages, item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "reasoning":
        turn = chat.turn(item, where)
        turn["reasoning"] = turn.get("reasoning", "") + _reasoning(item, where)
    elif kind == "function_call":
        chat.turn(item, where).setdefault("tool_calls", []).append(_call(item))
    elif kind == "function_call_output":
        answer = {"role": "tool", "tool_call_id": item["call_id"]}
        chat.add({**answer, "content": _text(item["output"])}, where)
    elif item["role"] == "assistant":
        turn = chat.turn(item, where)
        turn["content"] = (turn["content"] or "") + _text(item["content"])
    else:
        chat.add({"role": item["role"], "content": _text(item["content"])}, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What a protocol calls that which a chat calls otherwise.

    Attributes:
        fields: Fields of the chat to those of the request; longest first where one begins another.
        answer_id: What a `tool_call_id` is called.
        phrases: In what is said of messages.
    """

    fields: Mapping[str, str]
    answer_id: str
    phrases: Mapping[str, str]


def renamed(error: ApiError, origins: Sequence[str], wording: Wording) -> ApiError:
    """An error of the chat made from a request, in the words of that request.

    Args:
        error: Names a field of the chat.
        origins: Path behind each message.
        wording: Of the request's protocol.
    """
    old = error.param or ""
    new, message = old, error.message
    if old.startswith("messages["):
        number, _, rest = old.removeprefix("messages[").partition("]")
        new = _joined(origins[int(number)], rest, wording.answer_id)
        for phrase, own in wording.phrases.items():
            message = message.replace(phrase, own)
    else:
        for name, own in wording.fields.items():
            if old.startswith(name):
                new = own + old.removeprefix(name).replace(".function.", ".")
                break
    message = message.replace(f"'{old}'", f"'{new}'")
    if (new, message) == (old, error.message):
        return error
    return ApiError(error.status, message, param=new, code=error.code, headers=error.headers)


def _joined(origin: str, rest: str, answer_id: str) -> str:
    """The path of a part of a message: its content and the call it answers are in both."""
    if rest.startswith(".content"):
        return origin.removesuffix(".content") + rest
    return f"{origin}.{answer_id}" if rest == ".tool_call_id" else origin


def _goes_on(turn: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the assistant's turn so far.

    Between a call and its answer nobody else speaks, so whatever follows a call is of its turn: the
    model may write text between calls and behind them.
    """
    is_call = item.get("type", "message") == "function_call"
    return is_call or "tool_calls" in turn or turn.get("content") is None


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    content = item.get("content")
    if content:
        return "".join(part["text"] for part in content)
    sealed = item.get("encrypted_content")
    if sealed:
        return _unsealed(sealed, where)
    return "\n".join(part["text"] for part in item.get("summary") or ())


def _unsealed(sealed: str, where: str) -> str:
    mark, text = sealed[: len(SEAL)], sealed[len(SEAL) :]
    try:
        if mark == SEAL:
            return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        pass
    raise invalid(
        f"Invalid '{where}.encrypted_content': this server did not make it.",
        f"{where}.encrypted_content",
    )


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", part.get("refusal"))) for part in content)
