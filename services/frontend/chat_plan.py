"""A chat body to a `Submission`: check, render, resolve. Reads top to bottom in that order."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from services.frontend.bodies import Body
from services.frontend.conversation import (
    check_messages,
    check_tools,
    declared_tools,
    readable,
    template_arguments,
    text_of,
)
from services.frontend.errors import invalid
from services.frontend.fields import sort_extra, unknown_in_parts
from services.frontend.gateway import Gateway
from services.frontend.not_served import CHAT_NOT_SERVED, CHAT_TOOL_NOT_SERVED
from services.frontend.planning import check_common, output_of, submission_of
from services.frontend.render import NO_LIMIT, Conversation
from services.frontend.sampling import build_sampling, resolve_max_tokens
from services.frontend.schemas.chat import ChatRequest
from services.frontend.serving import Plan
from services.frontend.submission import ObjectKind, OutputPlan
from services.frontend.text_formats import text_format_of, unknown_in_format
from services.frontend.token_limits import truncated, with_prompt_logprobs, with_thinking_budget
from services.frontend.tool_choice import ToolRules, tool_rules_of, unknown_in_choice
from services.frontend.tools_constraint import constraint_of
from services.frontend.validation import parse
from services.frontend.visit import Visit
from shared.glm.render import RenderedPrompt, ends_in_reasoning
from shared.sampling import SamplingSpec

ID_PREFIX: Final = "chatcmpl-"


async def plan_chat(gateway: Gateway, body: Body, visit: Visit) -> Plan:
    """The whole way from a body to a submission."""
    request = parse(ChatRequest, body.value)
    unknown = unknown_in_chat(request)
    plan = await plan_conversation(gateway, request, body, visit)
    return Plan(submission=plan.submission, unknown_fields=unknown + plan.unknown_fields)


def unknown_in_chat(request: ChatRequest) -> list[str]:
    """The paths of unknown fields, but for those of messages and of a stream's options."""
    return [
        *sort_extra(request, CHAT_NOT_SERVED),
        *unknown_in_parts(request, except_for=("messages", "stream_options", "tools")),
        *unknown_in_tools(request),
        *unknown_in_format(request.response_format),
        *unknown_in_choice(request.tool_choice),
    ]


def unknown_in_tools(request: ChatRequest) -> list[str]:
    """The paths of unknown fields of tools."""
    unknown: list[str] = []
    for i, tool in enumerate(request.tools or ()):
        unknown += sort_extra(tool, CHAT_TOOL_NOT_SERVED, f"tools[{i}].")
        unknown += sort_extra(tool.function, CHAT_TOOL_NOT_SERVED, f"tools[{i}].function.")
    return unknown


async def plan_conversation(
    gateway: Gateway,
    request: ChatRequest,
    body: Body,
    visit: Visit,
    *,
    id_prefix: str = ID_PREFIX,
    adapt: Callable[[OutputPlan], OutputPlan] = lambda output: output,
) -> Plan:
    """A parsed chat to its submission: the one way for every protocol that is a conversation.

    Args:
        gateway: Shared parts.
        request: The parsed chat.
        body: The same unparsed, in the form of a chat body.
        visit: Of the HTTP request.
        id_prefix: Start of the answer's id.
        adapt: Makes the output of another protocol from that of a chat.
    """
    prepared = await prepare_chat(gateway, request, body, visit)
    prompt, rules = prepared.prompt, prepared.rules
    submission = await submission_of(
        gateway,
        request,
        visit,
        id_prefix=id_prefix,
        prompts=[prompt.token_ids],
        sampling=prepared.sampling,
        make_output=lambda: adapt(_output(gateway, request, prompt, rules, visit)),
    )
    submission = dataclasses.replace(submission, constraint_param=prepared.constraint_param)
    return Plan(submission=submission, unknown_fields=prepared.unknown_fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat that was checked, rendered and resolved."""

    prompt: RenderedPrompt
    sampling: SamplingSpec
    rules: ToolRules
    constraint_param: str
    unknown_fields: list[str]


async def prepare_chat(
    gateway: Gateway, request: ChatRequest, body: Body, visit: Visit
) -> PreparedChat:
    """Check, render and resolve a parsed chat."""
    unknown = check_common(gateway, request, num_prompts=1)
    rules = _check_chat(gateway, request)
    form, form_param = text_format_of(request)
    conversation, more_unknown = conversation_of(gateway, request, body)
    prompt = await _render(gateway, request, conversation, body, visit)
    sampling = _sampling(gateway, request, len(prompt.token_ids))
    sampling = with_thinking_budget(gateway, request.thinking_budget, prompt, sampling)
    sampling = with_prompt_logprobs(
        gateway, request, request.prompt_logprobs, [prompt.token_ids], sampling
    )
    thinks = prompt.starts_in_reasoning and gateway.settings.reasoning_parser != "none"
    constraint = constraint_of(
        form,
        rules,
        is_parallel=request.parallel_tool_calls is not False,
        end_think=gateway.dialect.control.end_think if thinks else None,
        is_replay=gateway.settings.worker_mode == "replay",
    )
    return PreparedChat(
        prompt=prompt,
        sampling=dataclasses.replace(sampling, constraint=constraint),
        rules=rules,
        constraint_param=form_param or "tools",
        unknown_fields=unknown + more_unknown,
    )


def conversation_of(
    gateway: Gateway, request: ChatRequest, body: Body
) -> tuple[Conversation, list[str]]:
    """What to render, checked, and the paths of unknown fields in it."""
    raw_messages, raw_tools = body.value["messages"], body.value.get("tools")
    unknown = check_messages(request.messages, raw_messages)
    check_tools(request.tools, raw_tools)
    arguments, unknown_arguments = template_arguments(request, gateway.dialect)
    is_continued = bool(request.continue_final_message)
    is_opened = request.add_generation_prompt
    if is_continued and is_opened:
        raise invalid(
            "'continue_final_message' needs 'add_generation_prompt': false.",
            "continue_final_message",
        )
    conversation = Conversation(
        messages=[readable(message) for message in raw_messages],
        tools=raw_tools,
        template_kwargs=arguments,
        add_generation_prompt=not is_continued if is_opened is None else is_opened,
        continue_final_message=is_continued,
    )
    return conversation, unknown + unknown_arguments


async def shown_ids(
    gateway: Gateway, request: ChatRequest, body: Body
) -> tuple[list[int], list[str]]:
    """A parsed chat as the model would see it, however long; paths of unknown fields in it.

    By the very rules of an answer, so that the count is what a request would cost.
    """
    tool_rules_of(request, has_parser=True)
    conversation, unknown = conversation_of(gateway, request, body)
    prompt = await gateway.renderer.render_chat(
        conversation, num_bytes=body.num_bytes, limit=NO_LIMIT
    )
    return prompt.token_ids, unknown


async def _render(
    gateway: Gateway, request: ChatRequest, conversation: Conversation, body: Body, visit: Visit
) -> RenderedPrompt:
    is_cut = request.truncate_prompt_tokens is not None
    prompt = await gateway.renderer.render_chat(
        conversation,
        num_bytes=body.num_bytes,
        limit=NO_LIMIT if is_cut else gateway.max_model_len,
        traceparent=visit.traceparent,
    )
    ids = truncated(
        request, prompt.token_ids, limit=gateway.max_model_len, max_tokens=_asked_tokens(request)
    )
    if len(ids) == len(prompt.token_ids):
        return prompt
    return dataclasses.replace(
        prompt,
        token_ids=list(ids),
        starts_in_reasoning=ends_in_reasoning(ids, gateway.dialect.control),
    )


def _asked_tokens(request: ChatRequest) -> int | None:
    # The newer name wins when both are given.
    is_new_name = request.max_completion_tokens is not None
    return request.max_completion_tokens if is_new_name else request.max_tokens


def _check_chat(gateway: Gateway, request: ChatRequest) -> ToolRules:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("'top_logprobs' is only allowed with 'logprobs': true.", "top_logprobs")
    return tool_rules_of(request, has_parser=gateway.settings.tool_call_parser != "none")


def _sampling(gateway: Gateway, request: ChatRequest, num_prompt: int) -> SamplingSpec:
    max_tokens = resolve_max_tokens(
        _asked_tokens(request),
        num_prompt=num_prompt,
        limit=gateway.max_model_len,
        default=None,
        param="messages",
    )
    return build_sampling(
        request,
        gateway.defaults,
        max_tokens=max_tokens,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        check_ids=gateway.renderer.check_ids,
        seeds=gateway.seeds,
    )


def _output(
    gateway: Gateway,
    request: ChatRequest,
    prompt: RenderedPrompt,
    rules: ToolRules,
    visit: Visit,
) -> OutputPlan:
    return dataclasses.replace(
        output_of(ObjectKind.CHAT_COMPLETION, gateway, visit, request, request),
        parse_reasoning=gateway.settings.reasoning_parser != "none",
        starts_in_reasoning=prompt.starts_in_reasoning,
        include_reasoning=request.include_reasoning is not False,
        tools=declared_tools(rules.tools),
        tool_choice=rules.choice,
        tool_choice_name=rules.name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        include_logprobs=bool(request.logprobs),
        num_top_logprobs=request.top_logprobs or 0,
        return_token_ids=bool(request.return_token_ids),
        return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
        echo_texts=_echo_texts(request),
        include_prompt_logprobs=request.prompt_logprobs is not None,
    )


def _echo_texts(request: ChatRequest) -> tuple[str, ...]:
    """The assistant's text that the answer goes on with, one per choice, when asked for."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ()
    text = readable(last.model_dump(include={"content", "refusal"}))["content"]
    return () if text is None else (text_of(text),) * (request.n or 1)
