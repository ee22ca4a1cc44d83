"""A messages body to a `Submission`: its turns become a chat, the answer keeps its own shape."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from services.frontend.bodies import Body
from services.frontend.chat_plan import plan_conversation, shown_ids
from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.fields import sort_extra, unknown_in_parts
from services.frontend.framing import MessageFraming
from services.frontend.gateway import Gateway
from services.frontend.message_turns import check_block_types, messages_of
from services.frontend.not_served import (
    MESSAGES_NOT_SERVED,
    MESSAGES_THINKING_NOT_SERVED,
    MESSAGES_TOOL_NOT_SERVED,
    OUTPUT_CONFIG_NOT_SERVED,
    Table,
)
from services.frontend.response_items import ChatMessages, Wording, renamed
from services.frontend.response_plan import response_format_of, unknown_in_flat_format
from services.frontend.schemas.fields import RequestFields
from services.frontend.schemas.messages import (
    ContextManagement,
    CountTokensRequest,
    MessageChat,
    MessagesRequest,
)
from services.frontend.serving import Plan
from services.frontend.submission import ObjectKind, OutputPlan
from services.frontend.tools_constraint import renamed_constraint
from services.frontend.validation import parse, quote
from services.frontend.visit import Visit

ID_PREFIX: Final = "msg_"
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_WORDING: Final = Wording(
    fields={
        "max_completion_tokens": "max_tokens",
        "thinking_token_budget": "thinking.budget_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tools": "tools",
        "tool_choice": "tool_choice",
    },
    answer_id="tool_use_id",
    phrases={
        "a message with role 'tool'": "a 'tool_result' block",
        "an assistant message with 'tool_calls'": "a turn with 'tool_use' blocks",
        "the 'tool_calls' of the assistant message": "the 'tool_use' blocks of the turn",
        "tool messages that answer each 'tool_call_id'": "a 'tool_result' for each 'tool_use_id'",
    },
)
# What assistants' blocks hold when a client sends them back as they came.
_BLOCK_EXTRAS: Final[Mapping[str, tuple[object, ...]]] = {
    "citations": ([],),
    "caller": ({"type": "direct"},),
}
# Parts that `_check` looks into.
_SORTED: Final = ("messages", "output_config", "thinking", "tool_choice", "tools")


async def plan_message(gateway: Gateway, body: Body, visit: Visit) -> Plan:
    """The whole way from a body to a submission."""
    _refuse_thread(body.value)
    check_block_types(body.value.get("messages"))
    request = parse(MessagesRequest, body.value)
    unknown = _check(request)
    raw, chat, left_out = _chat_body(request, body.value)
    raw["max_completion_tokens"] = request.max_tokens
    try:
        plan = await plan_conversation(
            gateway,
            parse(MessageChat, raw),
            Body(raw, body.num_bytes),
            visit,
            id_prefix=ID_PREFIX,
            adapt=lambda output: _adapted(output, request),
        )
    except ApiError as error:
        raise renamed(error, chat.origins, _WORDING) from None
    return dataclasses.replace(
        plan,
        submission=renamed_constraint(plan.submission, _WORDING.fields),
        unknown_fields=unknown + left_out + plan.unknown_fields,
        framing=MessageFraming(),
    )


async def count_tokens(gateway: Gateway, body: Body) -> tuple[int, list[str]]:
    """How many tokens a conversation has, as the model would see it; paths of unknown fields."""
    _refuse_thread(body.value)
    check_block_types(body.value.get("messages"))
    request = parse(CountTokensRequest, body.value)
    gateway.check_model(request.model)
    unknown = _check(request)
    raw, chat, left_out = _chat_body(request, body.value)
    try:
        shown = Body(raw, body.num_bytes)
        ids, inside = await shown_ids(gateway, parse(MessageChat, raw), shown)
    except ApiError as error:
        raise renamed(error, chat.origins, _WORDING) from None
    return len(ids), unknown + left_out + inside


def _check(request: MessagesRequest | CountTokensRequest) -> list[str]:
    """Refuse what only this protocol has; the paths of unknown fields."""
    unknown = sort_extra(request, MESSAGES_NOT_SERVED)
    unknown += unknown_in_parts(request, except_for=_SORTED)
    format_ = request.output_config.format if request.output_config else None
    unknown += unknown_in_flat_format(format_, "output_config.format")
    parts: tuple[tuple[str, BaseModel | None, Table], ...] = (
        ("tool_choice", request.tool_choice, {}),
        ("thinking", request.thinking, MESSAGES_THINKING_NOT_SERVED),
        ("output_config", request.output_config, OUTPUT_CONFIG_NOT_SERVED),
    )
    for name, part, known in parts:
        unknown += sort_extra(part, known, f"{name}.")
    for i, tool in enumerate(request.tools or ()):
        if tool.defer_loading:
            raise unsupported(f"tools[{i}].defer_loading", "tools cannot be searched here")
        unknown += sort_extra(tool, MESSAGES_TOOL_NOT_SERVED, f"tools[{i}].")
        unknown += unknown_in_parts(tool, f"tools[{i}].")
    for i, message in enumerate(request.messages):
        unknown += sort_extra(message, {}, f"messages[{i}].")
        blocks = message.content if isinstance(message.content, list) else ()
        for j, block in enumerate(blocks):
            where = f"messages[{i}].content[{j}]."
            unknown += sort_extra(block, _BLOCK_EXTRAS, where) + unknown_in_parts(block, where)
    choice, thinking = request.tool_choice, request.thinking
    if choice is not None and (choice.type == "tool") != (choice.name is not None):
        raise invalid(
            "Invalid 'tool_choice.name': it stands with the type 'tool', and only there.",
            "tool_choice.name",
        )
    if thinking is not None and thinking.budget_tokens is not None:
        _check_budget(request, thinking.type, thinking.budget_tokens)
    return unknown


def _refuse_thread(raw: Mapping[str, Any]) -> None:
    """Conversations are not kept for messages; by the details the SDK knows to send them whole."""
    if raw.get("thread") is not None:
        raise ApiError(
            400,
            "'thread' is not supported: send the whole conversation.",
            param="thread",
            code="unsupported_value",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


def _check_budget(
    request: MessagesRequest | CountTokensRequest, kind: str, num_tokens: int
) -> None:
    path = "thinking.budget_tokens"
    if kind != "enabled":
        raise invalid(f"Invalid '{path}': it needs 'thinking.type': 'enabled'.", path)
    if isinstance(request, MessagesRequest) and num_tokens >= request.max_tokens:
        raise invalid(
            f"Invalid '{path}': {num_tokens} is not less than 'max_tokens' ({request.max_tokens}).",
            path,
        )


def _chat_body(
    request: MessagesRequest | CountTokensRequest, raw: Mapping[str, Any]
) -> tuple[dict[str, Any], ChatMessages, list[str]]:
    """The request in the form of a chat body, its messages, and what was left out."""
    names = [name for name in RequestFields.model_fields if name not in ("metadata", "stop")]
    made = {
        name: raw[name]
        for name in (*names, "chat_template_kwargs")
        if raw.get(name) is not None and name in type(request).model_fields
    }
    given = request.metadata if isinstance(request, MessagesRequest) else None
    labels = {name: value for name, value in (given or {}).items() if value}
    if labels:
        made["metadata"] = labels
    chat, left_out = messages_of(raw["messages"], raw.get("system"))
    made["messages"] = chat.messages
    if request.messages[-1].role == "assistant":
        made |= {"continue_final_message": True, "add_generation_prompt": False}
    made |= _thinking(request)
    if request.output_config and request.output_config.format is not None:
        made["response_format"] = response_format_of(
            {"name": "answer", **request.output_config.format}
        )
    if raw.get("tools"):
        made["tools"] = [_chat_tool(tool) for tool in raw["tools"]]
    if keeps_thinking(request.context_management):
        arguments = made.get("chat_template_kwargs") or {}
        made["chat_template_kwargs"] = {"clear_thinking": False, **arguments}
    return made | _tool_choice(request), chat, left_out


def keeps_thinking(management: ContextManagement | None) -> bool:
    """Whether the model is to see all earlier thinking again; other edits are refused."""
    edits = (management.edits if management is not None else None) or ()
    for i, edit in enumerate(edits):
        where = f"context_management.edits[{i}]"
        if not edit.type.startswith("clear_thinking_"):
            raise unsupported(f"{where}.type", f"edits of type {quote(edit.type)} are not served")
        if edit.keep not in ("all", {"type": "all"}):
            raise unsupported(
                f"{where}.keep", "either all thinking is kept, or that of the last turn"
            )
    return bool(edits)


def _thinking(request: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    thinking, made = request.thinking, dict[str, Any]()
    if request.output_config and request.output_config.effort is not None:
        made["reasoning_effort"] = request.output_config.effort
    if thinking is None:
        return made
    if thinking.type == "disabled":
        made["reasoning_effort"] = "none"
    elif thinking.type == "enabled":
        made["thinking"] = {"type": "enabled"}
        made["thinking_token_budget"] = thinking.budget_tokens
    if thinking.display == "omitted":
        made["include_reasoning"] = False
    return made


def _tool_choice(request: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    made: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        made["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        made["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        made["tool_choice"] = _CHOICES[choice.type]
    return made


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"]}
    for name, own in (("description", "description"), ("parameters", "input_schema")):
        if tool.get(own) is not None:
            function[name] = tool[own]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _adapted(output: OutputPlan, request: MessagesRequest) -> OutputPlan:
    return dataclasses.replace(
        output,
        object_kind=ObjectKind.MESSAGE,
        stop=tuple(request.stop_sequences or ()) + tuple(request.stop or ()),
    )
