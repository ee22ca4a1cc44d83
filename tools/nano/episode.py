"""A whole conversation with right answers, in the shape the chat template takes."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Messages in OpenAI form; tool arguments are mappings, as the template wants them."""

    skill: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = True


def user(content: str) -> Message:
    """Makes a user message."""
    return {"role": "user", "content": content}


def assistant(
    content: str, *, reasoning: str, calls: list[tuple[str, dict[str, Any]]] | None = None
) -> Message:
    """Makes an assistant message, with calls as (name, arguments)."""
    message: Message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call-{index}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


def tool_result(content: str) -> Message:
    """Makes the message that carries a tool's result."""
    return {"role": "tool", "tool_call_id": "call-0", "content": content}
