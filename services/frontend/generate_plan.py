"""Token ids to a `Submission` whose answer are token ids; and chats to the ids that do that."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from services.frontend.bodies import Body
from services.frontend.chat_plan import prepare_chat, unknown_in_chat
from services.frontend.completion_plan import prepare_completion, unknown_in_completion
from services.frontend.errors import ApiError, context_exceeded, unsupported
from services.frontend.fields import sort_extra, unknown_in_parts
from services.frontend.gateway import Gateway
from services.frontend.not_served import GENERATE_NOT_SERVED, SAMPLING_NOT_SERVED
from services.frontend.planning import check_common, output_of, submission_of
from services.frontend.sampling import build_sampling, resolve_max_tokens
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.schemas.fields import GenerationFields, RequestFields, SamplingFields
from services.frontend.schemas.generate import GenerateRequest, SamplingParams
from services.frontend.serving import Plan
from services.frontend.submission import ObjectKind, OutputPlan
from services.frontend.text_formats import text_format_of, unknown_in_format
from services.frontend.token_limits import with_thinking_budget
from services.frontend.validation import parse
from services.frontend.visit import Visit
from shared.constraint import Constraint
from shared.glm.render import RenderedPrompt, ends_in_reasoning

ID_PREFIX: Final = "generate-tokens-"
_SAMPLING: Final = (
    *SamplingFields.model_fields,
    *("response_format", "skip_special_tokens", "n"),
)
_PASSED: Final = ("stream", "stream_options", "cache_salt", "priority", "request_id", "user")


async def plan_tokens(gateway: Gateway, body: Body, visit: Visit) -> Plan:
    """The whole way from a body to a submission."""
    request = parse(GenerateRequest, body.value)
    unknown = _unknown(request)
    params = request.sampling_params or SamplingParams.model_validate({})
    given = {name: value for name, value in params if name in GenerationFields.model_fields}
    own = {name: getattr(request, name) for name in ("model", "replay", *_PASSED)}
    fields = GenerationFields.model_construct(**given, **own)
    unknown += check_common(gateway, fields, num_prompts=1)
    ids, limit = request.token_ids, gateway.max_model_len
    if len(ids) >= limit:
        raise context_exceeded(limit, len(ids), None, "token_ids")
    gateway.renderer.check_ids(ids, "token_ids")
    try:
        sampling = build_sampling(
            fields,
            gateway.defaults,
            max_tokens=resolve_max_tokens(
                params.max_tokens,
                num_prompt=len(ids),
                limit=limit,
                default=None,
                param="token_ids",
            ),
            num_logprobs=params.logprobs,
            check_ids=gateway.renderer.check_ids,
            seeds=gateway.seeds,
        )
        prompt = _prompt(gateway, request)
        sampling = with_thinking_budget(gateway, params.thinking_token_budget, prompt, sampling)
        form, form_param = text_format_of(fields)
        if form is not None:
            end = gateway.dialect.control.end_think if prompt.starts_in_reasoning else None
            constraint = Constraint(format=form, start_after_token_id=end)
            sampling = dataclasses.replace(sampling, constraint=constraint)
        submission = await submission_of(
            gateway,
            fields,
            visit,
            id_prefix=ID_PREFIX,
            prompts=[ids],
            sampling=sampling,
            make_output=lambda: _output(gateway, request, params, visit),
        )
    except ApiError as error:
        raise _inside(error) from None
    submission = dataclasses.replace(submission, constraint_param=f"sampling_params.{form_param}")
    return Plan(submission=submission, unknown_fields=unknown)


async def render_chat(
    gateway: Gateway, body: Body, visit: Visit
) -> tuple[dict[str, Any], list[str]]:
    """A chat body as the generate request that answers it, and the paths of unknown fields."""
    request = parse(ChatRequest, body.value)
    unknown = unknown_in_chat(request)
    if request.echo:
        raise unsupported("echo", "a rendered request has no output to put the message before")
    prepared = await prepare_chat(gateway, request, body, visit)
    constraint = prepared.sampling.constraint
    if constraint is not None and constraint.calls is not None:
        raise unsupported("tools", "a rendered request cannot carry calls that are constrained")
    made = _rendered(gateway, request, prepared.prompt.token_ids, body.value, visit)
    params = made["sampling_params"]
    params["max_tokens"] = prepared.sampling.max_tokens
    if request.logprobs:
        params["logprobs"] = request.top_logprobs or 0
    if request.thinking_budget is not None:
        params["thinking_token_budget"] = request.thinking_budget
    made["reasoning_ended"] = not prepared.prompt.starts_in_reasoning
    return made, unknown + prepared.unknown_fields


async def render_completion(
    gateway: Gateway, body: Body, visit: Visit
) -> tuple[list[dict[str, Any]], list[str]]:
    """A completions body as generate requests, one per prompt, and the paths of unknown fields."""
    request = parse(CompletionRequest, body.value)
    unknown = unknown_in_completion(request)
    if request.echo:
        raise unsupported("echo", "a rendered request has no output to put the prompt before")
    prepared = await prepare_completion(gateway, request, visit)
    rendered = []
    for ids in prepared.prompts:
        made = _rendered(gateway, request, ids, body.value, visit)
        made["sampling_params"]["max_tokens"] = prepared.sampling.max_tokens
        if request.logprobs is not None:
            made["sampling_params"]["logprobs"] = request.logprobs
        rendered.append(made)
    return rendered, unknown + prepared.unknown_fields


def _unknown(request: GenerateRequest) -> list[str]:
    """The paths of unknown fields, but for those of a stream's options."""
    unknown = sort_extra(request, GENERATE_NOT_SERVED)
    unknown += unknown_in_parts(request, except_for=("sampling_params", "stream_options"))
    params, where = request.sampling_params, "sampling_params."
    if params is not None:
        unknown += sort_extra(params, SAMPLING_NOT_SERVED, where) + unknown_in_parts(params, where)
        unknown += [where + path for path in unknown_in_format(params.response_format)]
    return unknown


def _prompt(gateway: Gateway, request: GenerateRequest) -> RenderedPrompt:
    ids = request.token_ids
    is_open = ends_in_reasoning(ids, gateway.dialect.control)
    if request.reasoning_ended is not None:
        is_open = not request.reasoning_ended
    return RenderedPrompt(token_ids=ids, text="", starts_in_reasoning=is_open)


def _rendered(
    gateway: Gateway, request: RequestFields, ids: Sequence[int], raw: dict[str, Any], visit: Visit
) -> dict[str, Any]:
    """The part that all kinds of prompts have in common."""
    if raw.get("prompt_logprobs") is not None:
        raise unsupported("prompt_logprobs", "prompts of token ids are not measured")
    params = {name: raw[name] for name in _SAMPLING if raw.get(name) is not None}
    made: dict[str, Any] = {
        "request_id": request.request_id or visit.request_id,
        "model": gateway.model_name,
        "token_ids": list(ids),
        "sampling_params": params,
        "output_mode": "tokens",
    }
    passed = {name: raw[name] for name in _PASSED if raw.get(name) is not None}
    return {**passed, **made}


def _output(
    gateway: Gateway, request: GenerateRequest, params: SamplingParams, visit: Visit
) -> OutputPlan:
    return dataclasses.replace(
        output_of(ObjectKind.TOKENS, gateway, visit, request, params),
        include_text=request.output_mode == "text",
        include_logprobs=params.logprobs is not None,
        num_top_logprobs=params.logprobs or 0,
        num_choices_per_prompt=params.n or 1,
    )


def _inside(error: ApiError) -> ApiError:
    """An error of a sampling field, which stands one level deeper here."""
    name = (error.param or "").split("[")[0].split(".")[0]
    if name not in SamplingParams.model_fields:
        return error
    path = f"sampling_params.{error.param}"
    message = error.message.replace(f"'{error.param}'", f"'{path}'")
    return ApiError(error.status, message, param=path, code=error.code, headers=error.headers)
