"""A completions body to a `Submission`: check, encode, resolve."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.frontend.bodies import Body
from services.frontend.errors import context_exceeded, invalid
from services.frontend.fields import sort_extra, unknown_in_parts
from services.frontend.gateway import Gateway
from services.frontend.not_served import COMPLETION_NOT_SERVED
from services.frontend.planning import check_common, output_of, submission_of
from services.frontend.render import NO_LIMIT
from services.frontend.sampling import build_sampling, resolve_max_tokens
from services.frontend.schemas.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from services.frontend.serving import Plan
from services.frontend.submission import ObjectKind, OutputPlan
from services.frontend.text_formats import text_format_of, unknown_in_format
from services.frontend.token_limits import truncated, with_prompt_logprobs
from services.frontend.validation import parse
from services.frontend.visit import Visit
from shared.constraint import Constraint
from shared.sampling import SamplingSpec

ID_PREFIX: Final = "cmpl-"


async def plan_completion(gateway: Gateway, body: Body, visit: Visit) -> Plan:
    """The whole way from a body to a submission."""
    request = parse(CompletionRequest, body.value)
    unknown = unknown_in_completion(request)
    prepared = await prepare_completion(gateway, request, visit)
    submission = await submission_of(
        gateway,
        request,
        visit,
        id_prefix=ID_PREFIX,
        prompts=prepared.prompts,
        sampling=prepared.sampling,
        make_output=lambda: _output(gateway, request, prepared.echoes, visit),
    )
    submission = dataclasses.replace(submission, constraint_param=prepared.constraint_param)
    return Plan(submission=submission, unknown_fields=unknown + prepared.unknown_fields)


def unknown_in_completion(request: CompletionRequest) -> list[str]:
    """The paths of unknown fields."""
    return [
        *sort_extra(request, COMPLETION_NOT_SERVED),
        *unknown_in_parts(request, except_for=("stream_options",)),
        *unknown_in_format(request.response_format),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCompletion:
    """Prompts that were checked, encoded and resolved; an echo per choice, or none."""

    prompts: Sequence[Sequence[int]]
    sampling: SamplingSpec
    echoes: tuple[str, ...]
    constraint_param: str
    unknown_fields: list[str]


async def prepare_completion(
    gateway: Gateway, request: CompletionRequest, visit: Visit
) -> PreparedCompletion:
    """Check, encode and resolve a parsed body."""
    given = prompts_of(request)
    unknown = check_common(gateway, request, num_prompts=len(given))
    if request.max_tokens == 0 and not request.echo:
        raise invalid(
            "Invalid 'max_tokens': 0 is only allowed with 'echo': true.",
            "max_tokens",
            "integer_below_min_value",
        )
    form, form_param = text_format_of(request)
    prompts = await _encode(gateway, request, given, visit)
    sampling = _sampling(gateway, request, prompts)
    sampling = with_prompt_logprobs(gateway, request, _measured(request), prompts, sampling)
    if form is not None:
        sampling = dataclasses.replace(sampling, constraint=Constraint(format=form))
    is_cut = request.truncate_prompt_tokens is not None
    return PreparedCompletion(
        prompts=prompts,
        sampling=sampling,
        echoes=await _echoes(gateway, request, prompts if is_cut else given),
        constraint_param=form_param,
        unknown_fields=unknown,
    )


def _measured(request: CompletionRequest) -> int | None:
    """Alternatives per prompt token: an echo with logprobs has those of the prompt, too."""
    asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
    return max((num_top for num_top in asked if num_top is not None), default=None)


def prompts_of(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts as a list, texts or ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    listed: list[str] | list[list[int]] = prompt
    return listed


async def _encode(
    gateway: Gateway, request: CompletionRequest, given: Sequence[str | list[int]], visit: Visit
) -> list[Sequence[int]]:
    is_cut = request.truncate_prompt_tokens is not None
    limit = NO_LIMIT if is_cut else gateway.max_model_len
    max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
    prompts: list[Sequence[int]] = []
    for i, prompt in enumerate(given):
        param = "prompt" if len(given) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            ids = await gateway.renderer.encode(
                prompt,
                allow_control=True,
                limit=limit,
                param=param,
                traceparent=visit.traceparent,
            )
        else:
            if len(prompt) >= limit:
                raise context_exceeded(gateway.max_model_len, len(prompt), None, param)
            gateway.renderer.check_ids(prompt, param)
            ids = prompt
        if not ids:
            raise invalid(
                f"Invalid '{param}': a prompt has at least one token.", param, "empty_string"
            )
        prompts.append(truncated(request, ids, limit=gateway.max_model_len, max_tokens=max_tokens))
    return prompts


def _sampling(
    gateway: Gateway, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> SamplingSpec:
    # One bound holds for all prompts, so the longest one decides.
    max_tokens = resolve_max_tokens(
        # The mesh generates at least one token; of a prompt alone it is not shown.
        1 if request.max_tokens == 0 else request.max_tokens,
        num_prompt=max(map(len, prompts)),
        limit=gateway.max_model_len,
        default=DEFAULT_MAX_TOKENS,
        param="prompt",
    )
    return build_sampling(
        request,
        gateway.defaults,
        max_tokens=max_tokens,
        num_logprobs=request.logprobs,
        check_ids=gateway.renderer.check_ids,
        seeds=gateway.seeds,
    )


async def _echoes(
    gateway: Gateway, request: CompletionRequest, given: Sequence[str | Sequence[int]]
) -> tuple[str, ...]:
    """The text of each choice's prompt, when asked for."""
    if not request.echo:
        return ()
    texts = [
        prompt if isinstance(prompt, str) else await gateway.renderer.decode(prompt)
        for prompt in given
    ]
    return tuple(text for text in texts for _ in range(request.n or 1))


def _output(
    gateway: Gateway, request: CompletionRequest, echoes: tuple[str, ...], visit: Visit
) -> OutputPlan:
    return dataclasses.replace(
        output_of(ObjectKind.TEXT_COMPLETION, gateway, visit, request, request),
        include_logprobs=request.logprobs is not None,
        num_top_logprobs=request.logprobs or 0,
        return_token_ids=bool(request.return_token_ids),
        return_tokens_as_token_ids=bool(request.return_tokens_as_token_ids),
        echo_texts=echoes,
        include_prompt_logprobs=_measured(request) is not None,
        is_prompt_only=request.max_tokens == 0,
        num_choices_per_prompt=request.n or 1,
    )
