"""What all endpoints resolve alike between a parsed body and a `Submission`."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from services.frontend.errors import invalid, unsupported
from services.frontend.fields import sort_extra
from services.frontend.gateway import Gateway
from services.frontend.not_served import STREAM_OPTIONS_NOT_SERVED
from services.frontend.sampling import choice_seed
from services.frontend.schemas.fields import GenerationFields, Replay
from services.frontend.schemas.generate import GenerateRequest, SamplingParams
from services.frontend.submission import ObjectKind, OutputPlan, SequencePlan, Submission
from services.frontend.token_limits import with_token_limits
from services.frontend.visit import Visit
from shared.sampling import ReplayScript, SamplingSpec

MAX_SEQUENCES: Final = 128
# Fields that name a request for its sender; they stand in its trace.
_LABELS: Final = ("user", "safety_identifier", "prompt_cache_key", "session_id", "metadata")


def check_common(gateway: Gateway, request: GenerationFields, num_prompts: int) -> list[str]:
    """Refuse what is wrong before any work; the paths of unknown fields."""
    gateway.check_model(request.model)
    if request.stream_options is not None and not request.stream:
        raise invalid("'stream_options' is only allowed with 'stream': true.", "stream_options")
    options = request.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise invalid(
            "'stream_options.continuous_usage_stats' needs 'stream_options.include_usage'.",
            "stream_options.continuous_usage_stats",
        )
    num_sequences = num_prompts * (request.n or 1)
    if num_sequences > MAX_SEQUENCES:
        raise invalid(
            f"Invalid 'n': {num_prompts} prompts with {request.n} choices each are more than "
            f"{MAX_SEQUENCES} in one request.",
            "n",
            "integer_above_max_value",
        )
    _check_replay_mode(gateway, request)
    return sort_extra(options, STREAM_OPTIONS_NOT_SERVED, "stream_options.")


async def replay_script(
    gateway: Gateway, replay: Replay | None, traceparent: str = ""
) -> ReplayScript | None:
    """The script of a replay request; spellings of control tokens become control tokens."""
    if replay is None:
        return None
    if (replay.text is None) == (replay.token_ids is None):
        raise invalid("'replay' takes exactly one of 'text' and 'token_ids'.", "replay")
    if replay.token_ids is not None:
        gateway.renderer.check_ids(replay.token_ids, "replay.token_ids")
        ids: Sequence[int] = replay.token_ids
    else:
        ids = await gateway.renderer.encode(
            replay.text or "",
            allow_control=True,
            limit=gateway.max_model_len,
            param="replay.text",
            traceparent=traceparent,
        )
    return ReplayScript(token_ids=tuple(ids), tokens_per_step=tuple(replay.tokens_per_step or (1,)))


async def submission_of(
    gateway: Gateway,
    request: GenerationFields,
    visit: Visit,
    *,
    id_prefix: str,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSpec,
    make_output: Callable[[], OutputPlan],
) -> Submission:
    """The submission of a request that was checked, rendered and resolved.

    Args:
        gateway: Its settings bound the time.
        request: The parsed body.
        visit: Gets the id of the answer.
        id_prefix: Start of that id.
        prompts: Token ids; each is answered `n` times.
        sampling: Resolved.
        make_output: Called once the visit has its id.
    """
    script = await replay_script(gateway, request.replay, visit.traceparent)
    sampling = with_token_limits(gateway, request, sampling)
    return Submission(
        request_id=new_response_id(id_prefix, request, visit, sampling.seed),
        sequences=sequences_of(prompts, request.n or 1, sampling.seed, script),
        sampling=sampling,
        output=make_output(),
        traceparent=visit.traceparent,
        timeout_ms=int(gateway.settings.request_timeout_s * 1000),
        cache_salt=request.cache_salt or "",
        tenant_id=visit.tenant_id,
        priority=request.priority or 0,
        first_token_timeout_ms=request.first_token_timeout_ms or 0,
    )


def sequences_of(
    prompts: Sequence[Sequence[int]], n: int, seed: int, script: ReplayScript | None
) -> tuple[SequencePlan, ...]:
    """The choices, prompt by prompt, `n` each; a choice's seed does not depend on its prompt."""
    return tuple(
        SequencePlan(
            index=i * n + choice,
            prompt_token_ids=ids,
            seed=choice_seed(seed, choice),
            replay=script,
        )
        for i, ids in enumerate(prompts)
        for choice in range(n)
    )


def new_response_id(prefix: str, request: GenerationFields, visit: Visit, seed: int) -> str:
    """A fresh id of the answer; notes what log and trace say of the request.

    The body's `request_id` labels the visit. The seed is noted so that an unseeded answer, too, can
    be made again.
    """
    visit.response_id = f"{prefix}{uuid.uuid4().hex}"
    visit.seed = seed
    if request.request_id is not None and not visit.has_given_id:
        visit.request_id = request.request_id
    if visit.span is not None:
        visit.span.set("gen_ai.response.id", visit.response_id)
        visit.span.set("gen_ai.request.seed", str(seed))
        for name in _LABELS:
            if label := getattr(request, name):
                visit.span.set(f"glm.{name}", str(label))
    return visit.response_id


def output_of(
    kind: ObjectKind,
    gateway: Gateway,
    visit: Visit,
    request: GenerationFields | GenerateRequest,
    text: GenerationFields | SamplingParams,
) -> OutputPlan:
    """What all kinds of outputs have in common.

    Args:
        kind: Of object.
        gateway: The model's name.
        visit: The response's id.
        request: How it is sent.
        text: Where it is cut.
    """
    options = request.stream_options
    return OutputPlan(
        object_kind=kind,
        response_id=visit.response_id,
        model=gateway.model_name,
        created_s=unix_now(),
        is_stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        include_continuous_usage=bool(options and options.continuous_usage_stats),
        stop=tuple(text.stop or ()),
        include_stop_str_in_output=bool(text.include_stop_str_in_output),
        skip_special_tokens=text.skip_special_tokens is not False,
    )


def unix_now() -> int:
    """Seconds since the epoch, for `created`."""
    return int(time.time())


def _check_replay_mode(gateway: Gateway, request: GenerationFields) -> None:
    is_replay = gateway.settings.worker_mode == "replay"
    if is_replay and request.replay is None:
        raise invalid(
            "Missing required parameter: 'replay'. This server has no model, each request brings "
            "the output it wants.",
            "replay",
            "missing_required_parameter",
        )
    if not is_replay and request.replay is not None:
        raise unsupported("replay", "only a server in replay mode takes it")
