"""What a request forbids the model, as ids: allowed tokens, bad words, a budget of thinking."""

import dataclasses
from collections.abc import Sequence
from typing import Final

from services.frontend.errors import invalid, unsupported
from services.frontend.gateway import Gateway
from services.frontend.schemas.fields import GenerationFields, SamplingFields
from shared.glm.render import RenderedPrompt
from shared.sampling import SamplingSpec, ThinkingBudget

# About 64 MB of JSON.
MAX_PROMPT_ENTRIES: Final = 1 << 20


def with_token_limits(
    gateway: Gateway, request: SamplingFields, sampling: SamplingSpec
) -> SamplingSpec:
    """The sampling with the ids that the request allows and the words it forbids."""
    allowed = request.allowed_token_ids or []
    gateway.renderer.check_ids(allowed, "allowed_token_ids")
    words = request.bad_words or []
    runs = [run for i, word in enumerate(words) for run in _runs_of(gateway, word, i)]
    return dataclasses.replace(
        sampling,
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
        bad_words=tuple(dict.fromkeys(runs)),
    )


def with_thinking_budget(
    gateway: Gateway, budget: int | None, prompt: RenderedPrompt, sampling: SamplingSpec
) -> SamplingSpec:
    """The sampling with a bound of the think block that the prompt opens; -1 is no bound."""
    if budget is None or budget < 0 or not prompt.starts_in_reasoning:
        return sampling
    control = gateway.dialect.control
    return dataclasses.replace(
        sampling,
        thinking_budget=ThinkingBudget(
            # No answer is longer than that, and the wire's numbers end a little above.
            max_tokens=min(budget, sampling.max_tokens),
            end_token_id=control.end_think,
            # A call ends the thought as well.
            other_end_token_ids=(control.tool_call,),
        ),
    )


def with_prompt_logprobs(
    gateway: Gateway,
    request: GenerationFields,
    num_top: int | None,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSpec,
) -> SamplingSpec:
    """The sampling with the measuring of prompts, bounded: answers hold all of it at once.

    Args:
        gateway: Whether there is a model that measures.
        request: A chat or completion.
        num_top: Alternatives per token; None is no measuring.
        prompts: Each is measured for each choice of it.
        sampling: As resolved so far.
    """
    if num_top is None:
        return sampling
    param = "prompt_logprobs" if request.prompt_logprobs is not None else "echo"
    if gateway.settings.worker_mode == "replay":
        raise unsupported(param, "a server in replay mode has no model to measure prompts")
    if request.prompt_logprobs is not None and request.stream:
        raise invalid("'prompt_logprobs' is not allowed with 'stream': true.", "prompt_logprobs")
    num_entries = (request.n or 1) * (num_top + 1) * sum(map(len, prompts))
    if num_entries > MAX_PROMPT_ENTRIES:
        param = param.replace("echo", "logprobs")
        raise invalid(
            f"Invalid '{param}': log-probabilities of the prompts would have {num_entries} "
            f"entries, at most {MAX_PROMPT_ENTRIES} are given.",
            param,
        )
    return dataclasses.replace(sampling, num_prompt_logprobs=num_top)


def truncated(
    request: GenerationFields, ids: Sequence[int], *, limit: int, max_tokens: int | None
) -> Sequence[int]:
    """The prompt, cut as the request wants it.

    Args:
        request: May ask for a cut.
        ids: The whole prompt.
        limit: Of the context.
        max_tokens: Asked output; -1 leaves room for it.
    """
    most = request.truncate_prompt_tokens
    if most is None:
        return ids
    if most == 0 or most > limit:
        raise invalid(
            f"Invalid 'truncate_prompt_tokens': {most} is not within 1 and the context of {limit} "
            "tokens; -1 cuts to what fits.",
            "truncate_prompt_tokens",
        )
    if most == -1:
        most = max(1, limit - (max_tokens or 1))
    if len(ids) <= most:
        return ids
    return ids[:most] if request.truncation_side == "right" else ids[-most:]


def _runs_of(gateway: Gateway, word: str, position: int) -> list[tuple[int, ...]]:
    """A word at the beginning of a text and behind a space are different tokens."""
    plain = word.lstrip()
    if not plain:
        raise invalid(
            f"Invalid 'bad_words[{position}]': it holds nothing but spaces.",
            f"bad_words[{position}]",
        )
    encode = gateway.dialect.encode
    runs = [tuple(encode(text, allow_control=False)) for text in (plain, " " + plain)]
    # The second one only counts if it is one word as well, and not the first behind a space.
    return runs if len(runs[1]) == len(runs[0]) and runs[1][0] != runs[0][0] else runs[:1]
