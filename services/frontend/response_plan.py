"""A responses body to a `Submission`: its input becomes a chat, the answer keeps its own shape."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from services.frontend.bodies import Body
from services.frontend.chat_plan import plan_conversation, shown_ids
from services.frontend.errors import ApiError, invalid, unsupported
from services.frontend.fields import sort_extra, unknown_in_object, unknown_in_parts
from services.frontend.framing import ResponseFraming
from services.frontend.gateway import Gateway
from services.frontend.not_served import (
    REASONING_NOT_SERVED,
    RESPONSE_NOT_SERVED,
    RESPONSE_TOOL_NOT_SERVED,
    Table,
)
from services.frontend.planning import unix_now
from services.frontend.response_items import (
    ChatMessages,
    Wording,
    check_item_types,
    items_of,
    messages_of,
    renamed,
)
from services.frontend.response_store import StoredResponse
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.fields import RequestFields
from services.frontend.schemas.responses import ResponsesRequest
from services.frontend.serving import Plan
from services.frontend.submission import ObjectKind, OutputPlan
from services.frontend.text_formats import unknown_in_format
from services.frontend.tool_choice import unknown_in_choice
from services.frontend.tools_constraint import renamed_constraint
from services.frontend.validation import parse, quote
from services.frontend.visit import Visit

ID_PREFIX: Final = "resp_"
_SEALED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
# What stands in items of ours and of other servers, and says nothing to the model.
_FROM_SERVERS: Final = frozenset(
    {"annotations", "async", "async_", "caller", "logprobs", "namespace", "created_by"}
)
# Parts that `_check` looks into.
_SORTED: Final = ("input", "reasoning", "stream_options", "text", "tools")
# Fields of the chat made from a request, and what they are called in it.
_WORDING: Final = Wording(
    fields={
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "logprobs": "include",
        "tools": "tools",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice": "tool_choice",
    },
    answer_id="call_id",
    phrases={
        "a message with role 'tool'": "a 'function_call_output'",
        "an assistant message with 'tool_calls'": "'function_call' items",
        "the 'tool_calls' of the assistant message": "the 'function_call' items",
        "tool messages that answer each 'tool_call_id'": "an output for each 'call_id'",
    },
)
# The same in both.
_AS_THEY_ARE: Final = (
    *(name for name in RequestFields.model_fields if name != "stop"),
    *("stop", "chat_template_kwargs", "include_reasoning", "thinking_token_budget"),
    *("parallel_tool_calls", "top_logprobs"),
)


async def plan_response(gateway: Gateway, body: Body, visit: Visit) -> Plan:
    """The whole way from a body to a submission."""
    check_item_types(body.value.get("input"))
    request = parse(ResponsesRequest, body.value)
    unknown = _check(request)
    stored = await _previous(gateway, request, visit)
    items = stored + items_of(body.value["input"])
    chat = messages_of(items, instructions=request.instructions, num_stored=len(stored))
    if not chat.messages:
        raise invalid("Invalid 'input': expected at least one item.", "input", "empty_array")
    plan = await _plan_fitting(gateway, request, body, visit, chat)
    answer = _KeptResponse(gateway, visit, items, _echo(gateway, request, body.value), request)
    return dataclasses.replace(
        plan,
        submission=renamed_constraint(plan.submission, _WORDING.fields),
        unknown_fields=unknown + plan.unknown_fields,
        framing=ResponseFraming(),
        kept=answer if request.store is not False else None,
        is_background=bool(request.background),
    )


async def count_input(gateway: Gateway, body: Body, visit: Visit) -> tuple[int, list[str]]:
    """How many tokens the model would see of an input; paths of unknown fields."""
    check_item_types(body.value.get("input"))
    request = parse(ResponsesRequest, body.value)
    gateway.check_model(request.model)
    unknown = _check(request)
    stored = await _previous(gateway, request, visit)
    items = stored + items_of(body.value["input"])
    chat = messages_of(items, instructions=request.instructions, num_stored=len(stored))
    raw = _chat_body(request, body.value, chat)
    try:
        shown = Body(raw, body.num_bytes + _size_of(chat.messages))
        ids, inside = await shown_ids(gateway, parse(ChatRequest, raw), shown)
    except ApiError as error:
        raise renamed(error, chat.origins, _WORDING) from None
    return len(ids), unknown + inside


def _check(request: ResponsesRequest) -> list[str]:
    """Refuse what only this protocol has; the paths of unknown fields."""
    unknown = sort_extra(request, RESPONSE_NOT_SERVED)
    parts: tuple[tuple[str, BaseModel | None, Table], ...] = (
        ("reasoning", request.reasoning, REASONING_NOT_SERVED),
        ("text", request.text, {}),
        ("stream_options", request.stream_options, {}),
    )
    for name, part, known in parts:
        unknown += sort_extra(part, known, f"{name}.")
    unknown += _unknown_inside(request)
    for name in request.include or ():
        if name not in (_SEALED, _LOGPROBS):
            raise unsupported("include", f"there is no {quote(name)} here")
    if request.top_logprobs and _LOGPROBS not in (request.include or ()):
        raise invalid(f"'top_logprobs' needs 'include': ['{_LOGPROBS}'].", "top_logprobs")
    if request.reasoning and request.reasoning.summary not in (None, "auto"):
        raise unsupported("reasoning.summary", "the thinking itself is shown, not summaries")
    if request.text and request.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "this model knows no levels of it")
    _check_way(request)
    return unknown


def _unknown_inside(request: ResponsesRequest) -> list[str]:
    """Paths of unknown fields of items, their parts and tools; what servers put there is known."""
    unknown: list[str] = []
    for i, tool in enumerate(request.tools or ()):
        unknown += sort_extra(tool, RESPONSE_TOOL_NOT_SERVED, f"tools[{i}].")
    unknown += unknown_in_parts(request, except_for=_SORTED)
    unknown += _unknown_in_choice(request.tool_choice)
    unknown += unknown_in_flat_format(request.text.format if request.text else None, "text.format")
    items = request.input if isinstance(request.input, list) else ()
    for i, item in enumerate(items):
        where = f"input[{i}]"
        unknown += sort_extra(item, {}, f"{where}.")
        for name in ("content", "output", "summary"):
            parts = getattr(item, name, None)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                unknown += sort_extra(part, {}, f"{where}.{name}[{j}].")
    return [path for path in unknown if path.rpartition(".")[2] not in _FROM_SERVERS]


def _check_way(request: ResponsesRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed with 'stream': true.", "stream_options")
    if request.stream_options and request.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "this version does not have it")
    if request.background and request.store is False:
        raise invalid("'background' needs 'store': true.", "background")
    if request.background and request.stream:
        raise unsupported("background", "not together with 'stream'; ask for the response later")


async def _previous(
    gateway: Gateway, request: ResponsesRequest, visit: Visit
) -> list[dict[str, Any]]:
    """The items of the response that this one goes on from."""
    name = request.previous_response_id
    if name is None:
        return []
    stored = await gateway.responses.get(name, visit.tenant_id)
    if stored is None:
        raise ApiError(
            404,
            f"Previous response with id '{name}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    shown = msgspec.json.decode(stored.object_json)
    if shown["status"] not in ("completed", "incomplete"):
        raise invalid(
            f"Invalid 'previous_response_id': the response is {shown['status']}.",
            "previous_response_id",
        )
    given: list[dict[str, Any]] = msgspec.json.decode(stored.input_json)
    return given + list(shown["output"])


async def _plan_fitting(
    gateway: Gateway, request: ResponsesRequest, body: Body, visit: Visit, chat: ChatMessages
) -> Plan:
    """Plan the chat; with `truncation: auto` without the oldest turns, as few as have to go."""

    async def attempt(start: int) -> Plan:
        first = 1 if chat.origins[0] == "instructions" else 0
        kept = chat.messages[:first] + chat.messages[start:]
        origins = chat.origins[:first] + chat.origins[start:]
        return await _plan_chat(gateway, request, body, visit, ChatMessages(kept, origins))

    first = 1 if chat.origins[0] == "instructions" else 0
    # Cuts stand before a user's message, so that calls and their answers stay together.
    cuts = [first, *(i for i, m in enumerate(chat.messages) if m["role"] == "user" and i > first)]
    low, high = 0, len(cuts) - 1
    best: Plan | None = None
    while low <= high:
        middle = 0 if best is None and low == 0 else (low + high) // 2
        try:
            best = await attempt(cuts[middle])
            high = middle - 1
        except ApiError as error:
            if error.code != "context_length_exceeded" or request.truncation != "auto":
                raise
            failure, low = error, middle + 1
    if best is None:
        raise failure
    return best


async def _plan_chat(
    gateway: Gateway, request: ResponsesRequest, body: Body, visit: Visit, chat: ChatMessages
) -> Plan:
    raw = _chat_body(request, body.value, chat)
    try:
        parsed = parse(ChatRequest, raw)
        return await plan_conversation(
            gateway,
            parsed,
            # Earlier items count as well: the size decides where the prompt is rendered.
            Body(raw, body.num_bytes + _size_of(chat.messages)),
            visit,
            id_prefix=ID_PREFIX,
            adapt=lambda output: _adapted(output, gateway, request, body.value),
        )
    except ApiError as error:
        raise renamed(error, chat.origins, _WORDING) from None


def _chat_body(
    request: ResponsesRequest, raw: Mapping[str, Any], chat: ChatMessages
) -> dict[str, Any]:
    """The request in the form of a chat body."""
    made: dict[str, Any] = {name: raw[name] for name in _AS_THEY_ARE if raw.get(name) is not None}
    made["messages"] = chat.messages
    if request.max_output_tokens is not None:
        made["max_completion_tokens"] = request.max_output_tokens
    if request.reasoning and request.reasoning.effort is not None:
        made["reasoning_effort"] = request.reasoning.effort
    if request.text and request.text.format is not None:
        made["response_format"] = response_format_of(request.text.format)
    if _LOGPROBS in (request.include or ()):
        made["logprobs"] = True
    if raw.get("tools"):
        made["tools"] = [_chat_tool(tool) for tool in raw["tools"]]
    if request.tool_choice is not None:
        made["tool_choice"] = chat_tool_choice(request.tool_choice)
    return made


def response_format_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """`text.format` as `response_format`: a schema stands one level deeper there."""
    if given.get("type") != "json_schema":
        return dict(given)
    inner = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": inner}


def unknown_in_flat_format(given: Mapping[str, Any] | None, where: str) -> list[str]:
    """Paths of names in such a format that nobody knows."""
    found = unknown_in_format(response_format_of(given)) if given is not None else []
    return [f"{where}.{path.rpartition('.')[2]}" for path in found]


def _unknown_in_choice(given: object) -> list[str]:
    """Paths of names in a `tool_choice` of this protocol that nobody knows."""
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind not in ("function", "allowed_tools"):
        return []
    if kind == "function":
        if "name" not in given:
            return unknown_in_choice(given)
        return unknown_in_object(given, ("type", "name"), "tool_choice")
    unknown = unknown_in_object(given, ("type", "mode", "tools"), "tool_choice")
    tools = given.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        unknown += unknown_in_object(tool, ("type", "name"), f"tool_choice.tools[{i}]")
    return unknown


def chat_tool_choice(given: object) -> object:
    """The tool choice with functions as chats write them."""
    if not isinstance(given, dict):
        return given
    if given.get("type") == "function" and "name" in given:
        return {"type": "function", "function": {"name": given["name"]}}
    if given.get("type") == "allowed_tools":
        tools = given.get("tools")
        if isinstance(tools, list):
            tools = [_chat_choice(tool) for tool in tools]
        mode = given.get("mode")
        allowed = {"mode": "auto" if mode is None else mode, "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return given


def _chat_choice(tool: object) -> object:
    if isinstance(tool, dict) and tool.get("type") == "function":
        return {"type": "function", "function": {"name": tool.get("name")}}
    return tool


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": tool["type"], "function": function}


def _adapted(
    output: OutputPlan, gateway: Gateway, request: ResponsesRequest, raw: Mapping[str, Any]
) -> OutputPlan:
    return dataclasses.replace(
        output,
        object_kind=ObjectKind.RESPONSE,
        echo_json=msgspec.json.encode(_echo(gateway, request, raw)),
        keep_object=bool(request.stream) and request.store is not False,
        include_sealed_reasoning=_SEALED in (request.include or ()),
    )


def _echo(gateway: Gateway, request: ResponsesRequest, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What of the request stands in the response."""
    reasoning, text = request.reasoning, request.text
    defaults = gateway.defaults
    return {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": _given(request.temperature, defaults.temperature),
        "text": {"format": (text.format if text else None) or {"type": "text"}},
        "tool_choice": request.tool_choice if request.tool_choice is not None else "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in raw.get("tools") or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": _given(request.top_p, defaults.top_p),
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _size_of(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)


@dataclass(frozen=True, slots=True)
class _KeptResponse:
    """How a response is kept, and what it looks like while it is not there yet."""

    gateway: Gateway
    visit: Visit
    items: Sequence[Mapping[str, Any]]
    echo: Mapping[str, Any]
    request: ResponsesRequest

    async def keep(self, object_json: bytes, *, is_open: bool = False) -> bool:
        """Put the object, in whatever state, into the store; whether it took it."""
        stored = StoredResponse(
            object_json=object_json,
            input_json=msgspec.json.encode(list(self.items)),
            is_open=is_open,
        )
        responses, visit = self.gateway.responses, self.visit
        return await responses.put(visit.response_id, visit.tenant_id, stored)

    def unfinished(self, status: str, error: ApiError | None = None) -> bytes:
        """The object without an output."""
        shown = {
            "id": self.visit.response_id,
            "object": "response",
            "created_at": unix_now(),
            "model": self.gateway.model_name,
            "status": status,
            "error": {"code": "server_error", "message": error.message} if error else None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }
        return msgspec.json.encode(shown | dict(self.echo))
