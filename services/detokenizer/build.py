"""A submitted request -> its choices, its response and the presenter of its object.

Everything that can be wrong with a request is refused here, before anything is sent upstream.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from services.detokenizer.assemble import Presenter
from services.detokenizer.calls import CallRules
from services.detokenizer.choice import Choice, ChoiceRules, TextMachine
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.machine import MachineRules, OutputMachine
from services.detokenizer.messages import (
    ObjectKind,
    OutputSpec,
    SequenceSpec,
    TextSubmit,
    TokenSubmit,
    ToolChoice,
)
from services.detokenizer.ordered import OrderedText
from services.detokenizer.plain import PlainText
from services.detokenizer.presenters import presenter_of
from services.detokenizer.response import Response
from services.detokenizer.schema import ArgumentTypes
from services.detokenizer.stops import StopAutomaton, StopMatcher
from services.detokenizer.time_limits import TimeLimits
from services.detokenizer.usage import Usage, count_usage
from shared.errors import FailureReason, RequestError
from shared.glm.tokenizer import Vocabulary
from shared.tracing import start_span

# Limits of the contract, glm/v1/detokenizer.proto.
MAX_REQUEST_ID_BYTES = 128
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_TOOLS = 128
# The scheduler is told a little less, so that it is the one that ends a late request.
DEADLINE_MARGIN_MS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What all requests of this process share."""

    vocabulary: Vocabulary
    fingerprint: str
    max_timeout_ms: int
    make_call_id: Callable[[], str]


def make_call_id() -> str:
    """A fresh id of a tool call, in OpenAI's form."""
    return "call_" + uuid.uuid4().hex[:24]


def build_response(submit: TextSubmit, context: BuildContext, now: float) -> Response:
    """Choices and their span; `RequestError` names what is wrong."""
    _check(submit)
    choices = _build_choices(submit, context)
    return Response(
        submit.request_id,
        choices,
        count=_counter(submit.output, choices),
        limits=TimeLimits(
            started_at=now,
            timeout_ms=_timeout_ms(submit, context),
            first_token_timeout_ms=submit.first_token_timeout_ms,
        ),
        span=start_span(
            "detokenize",
            traceparent=submit.traceparent,
            attributes={"request_id": submit.request_id, "num_sequences": len(choices)},
        ),
    )


def build_presenter(response: Response, spec: OutputSpec, context: BuildContext) -> Presenter:
    """What turns the choices into the client's objects."""
    logprobs = LogprobWriter(
        context.vocabulary,
        num_top=spec.num_top_logprobs,
        shows_ids=spec.return_tokens_as_token_ids,
    )
    count = _counter(spec, response.choices)
    return presenter_of(spec, logprobs, count, fingerprint=context.fingerprint)


def upstream_submit(
    submit: TextSubmit, response: Response, context: BuildContext, request_id: str
) -> TokenSubmit:
    """The request as the scheduler gets it."""
    timeout_ms = max(1, _timeout_ms(submit, context) - DEADLINE_MARGIN_MS)
    return TokenSubmit(
        request_id=request_id,
        sequences=submit.sequences,
        sampling=submit.sampling,
        traceparent=response.traceparent or submit.traceparent,
        priority=submit.priority,
        timeout_ms=timeout_ms,
        cache_salt=submit.cache_salt,
        tenant_id=submit.tenant_id,
        first_token_timeout_ms=submit.first_token_timeout_ms,
    )


def _timeout_ms(submit: TextSubmit, context: BuildContext) -> int:
    return min(submit.timeout_ms or context.max_timeout_ms, context.max_timeout_ms)


def _counter(spec: OutputSpec, choices: tuple[Choice, ...]) -> Callable[[], Usage]:
    is_chat = spec.object_kind.is_conversation
    per_prompt = spec.num_choices_per_prompt or (len(choices) if is_chat else 1)
    has_reasoning = is_chat and spec.parse_reasoning

    def count() -> Usage:
        return count_usage(choices, num_choices_per_prompt=per_prompt, has_reasoning=has_reasoning)

    return count


def _build_choices(submit: TextSubmit, context: BuildContext) -> tuple[Choice, ...]:
    spec, sampling = submit.output, submit.sampling
    eos = frozenset(sampling.eos_token_ids)
    rules = ChoiceRules(
        vocabulary=context.vocabulary,
        stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos),
        eos_ids=eos,
        min_tokens=sampling.min_tokens,
        has_stop_strings=bool(spec.stop),
        shows_stop_token=spec.include_stop_str_in_output,
        keeps_logprobs=spec.include_logprobs,
        keeps_ids=spec.return_token_ids or spec.object_kind is ObjectKind.TOKENS,
        hides_reasoning=not spec.include_reasoning,
        is_prompt_only=spec.is_prompt_only,
        # A named call is no reason of its own in a chat; a message says what it ends with.
        is_named_call=spec.tool_choice is ToolChoice.NAMED and not spec.object_kind.is_ordered,
    )
    automaton = StopAutomaton(spec.stop) if spec.stop else None
    machine_rules = _machine_rules(spec)

    def make_text() -> TextMachine:
        stops = None
        if automaton is not None:
            stops = StopMatcher(automaton, is_included=spec.include_stop_str_in_output)
            stops.is_armed = False
        if not spec.object_kind.is_conversation:
            return PlainText(
                context.vocabulary, skips_special_tokens=spec.skip_special_tokens, stops=stops
            )
        machine = OutputMachine(
            context.vocabulary, machine_rules, make_id=context.make_call_id, stops=stops
        )
        if not spec.object_kind.is_ordered:
            return machine
        return OrderedText(
            machine,
            shows_reasoning=spec.include_reasoning,
            shows_all_calls=spec.parallel_tool_calls,
            tells_tokens=spec.include_logprobs,
        )

    choices = tuple(
        Choice(
            sequence.index,
            sequence.num_prompt_tokens,
            make_text(),
            rules,
            prompt_token_ids=sequence.prompt_token_ids if spec.return_token_ids else b"",
            measured_token_ids=sequence.prompt_token_ids if spec.include_prompt_logprobs else b"",
        )
        for sequence in submit.sequences
    )
    for choice, sequence in zip(choices, submit.sequences, strict=True):
        choice.feed(sequence.unpack_output(), None)
    return choices


def _machine_rules(spec: OutputSpec) -> MachineRules:
    tools = {tool.name: ArgumentTypes(tool.parameters) for tool in spec.tools}
    allowed = frozenset(tools)
    if spec.tool_choice is ToolChoice.NONE:
        allowed = frozenset()
    elif spec.tool_choice is ToolChoice.NAMED:
        allowed = frozenset({spec.tool_choice_name})
    return MachineRules(
        calls=CallRules(tools=tools, allowed=allowed),
        starts_in_reasoning=spec.starts_in_reasoning,
        parses_reasoning=spec.parse_reasoning,
    )


def _check(submit: TextSubmit) -> None:
    spec, sequences = submit.output, submit.sequences
    if len(submit.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        raise _invalid("request_id", f"has more than {MAX_REQUEST_ID_BYTES} bytes")
    if [sequence.index for sequence in sequences] != list(range(len(sequences))) or not sequences:
        raise _invalid("sequences", "must be there, with indexes from 0 on")
    for sequence in sequences:
        _check_sequence(sequence, spec)
    if spec.object_kind.is_ordered and len(sequences) != 1:
        raise _invalid("sequences", "must be one for an object of this kind")
    if len(spec.stop) > MAX_STOPS:
        raise _invalid("output.stop", f"has more than {MAX_STOPS} strings")
    if any(not 1 <= len(stop.encode()) <= MAX_STOP_BYTES for stop in spec.stop):
        raise _invalid("output.stop", f"strings must have 1 to {MAX_STOP_BYTES} bytes")
    if len(spec.tools) > MAX_TOOLS:
        raise _invalid("output.tools", f"has more than {MAX_TOOLS} tools")
    if spec.tool_choice is ToolChoice.NAMED and spec.tool_choice_name not in {
        tool.name for tool in spec.tools
    }:
        raise _invalid("output.tool_choice_name", "is no declared tool")
    if len(spec.echo_texts) not in (0, len(sequences)):
        raise _invalid("output.echo_texts", "must be empty or one per sequence")


def _check_sequence(sequence: SequenceSpec, spec: OutputSpec) -> None:
    where = f"sequences.[{sequence.index}]"
    for name in ("prompt_token_ids", "output_token_ids"):
        if len(getattr(sequence, name)) % 4:
            raise _invalid(f"{where}.{name}", "is no run of uint32")
    if not sequence.prompt_token_ids:
        raise _invalid(f"{where}.prompt_token_ids", "is empty")
    if sequence.output_token_ids and spec.include_logprobs:
        raise _invalid(f"{where}.output_token_ids", "cannot be continued with logprobs")


def _invalid(field: str, message: str) -> RequestError:
    return RequestError(FailureReason.INVALID_ARGUMENT, f"{field} {message}", field=field)
