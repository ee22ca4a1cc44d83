"""What travels inside this service: requests as frontends send them and as the scheduler gets them.

Prompt ids pass through untouched, hence they stay packed (little-endian uint32).
"""

import enum
from array import array
from dataclasses import dataclass, fields
from typing import Final

from shared.endings import FinishReason
from shared.errors import RequestError
from shared.sampling import ReplayScript, SamplingSpec, SequenceStats

# Of a caller's id where ours follows it; schedulers take 128 bytes for both.
MAX_LABEL_BYTES: Final = 90


def label_of(request_id: str, max_bytes: int = MAX_LABEL_BYTES) -> str:
    """An id without what is too long of it to be followed by something."""
    return request_id.encode()[:max_bytes].decode(errors="ignore")


class ObjectKind(enum.IntEnum):
    """The OpenAI object an answer becomes; numbers of glm.v1.ObjectKind."""

    CHAT_COMPLETION = 1
    TEXT_COMPLETION = 2
    RESPONSE = 3
    MESSAGE = 4
    TOKENS = 5

    @property
    def is_conversation(self) -> bool:
        """Whether the output is an assistant's turn in the model's dialect."""
        return self not in (ObjectKind.TEXT_COMPLETION, ObjectKind.TOKENS)

    @property
    def is_ordered(self) -> bool:
        """Whether the object is a list of items in the order of the output, of one choice."""
        return self in (ObjectKind.RESPONSE, ObjectKind.MESSAGE)


class ToolChoice(enum.IntEnum):
    """Whether and which tools may be called; numbers of glm.v1.ToolChoiceMode."""

    NONE = 1
    AUTO = 2
    REQUIRED = 3
    NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A declared tool; `parameters` is the parsed JSON Schema or None."""

    name: str
    parameters: object


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """How the output is cut, parsed and shown; fields of glm.v1.OutputSpec."""

    object_kind: ObjectKind
    response_id: str = ""
    model: str = ""
    created_s: int = 0
    is_stream: bool = False
    include_usage: bool = False
    include_continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    parse_reasoning: bool = True
    starts_in_reasoning: bool = False
    include_reasoning: bool = True
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: ToolChoice = ToolChoice.NONE
    tool_choice_name: str = ""
    parallel_tool_calls: bool = True
    include_logprobs: bool = False
    num_top_logprobs: int = 0
    return_token_ids: bool = False
    echo_texts: tuple[str, ...] = ()
    # How many consecutive choices share a prompt; 0: all of a chat, one of a completion.
    num_choices_per_prompt: int = 0
    # What the client sent and gets back as it was: members of a JSON object, without its braces.
    echo_members: bytes = b""
    keep_object: bool = False
    return_tokens_as_token_ids: bool = False
    include_text: bool = False
    include_sealed_reasoning: bool = False
    include_prompt_logprobs: bool = False
    is_prompt_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One choice on its way in."""

    index: int
    prompt_token_ids: bytes
    output_token_ids: bytes = b""
    seed: int = 0
    replay: ReplayScript | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids) // 4

    def unpack_output(self) -> list[int]:
        """Ids generated before, by another mesh member."""
        return array("I", self.output_token_ids).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSubmit:
    """One response with its sequences, as it comes in; fields of glm.v1.TextSubmit."""

    request_id: str
    sequences: tuple[SequenceSpec, ...]
    sampling: SamplingSpec
    output: OutputSpec
    traceparent: str = ""
    priority: int = 0
    timeout_ms: int = 0
    cache_salt: str = ""
    tenant_id: str = ""
    first_token_timeout_ms: int = 0
    attempt: int = 0

    @property
    def attempt_id(self) -> str:
        """The request's id at the scheduler, where an earlier attempt may not have ended yet."""
        if not self.attempt:
            return self.request_id
        return f"{label_of(self.request_id)}.{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSubmit:
    """The same on its way to the scheduler."""

    request_id: str
    sequences: tuple[SequenceSpec, ...]
    sampling: SamplingSpec
    traceparent: str = ""
    priority: int = 0
    timeout_ms: int = 0
    cache_salt: str = ""
    tenant_id: str = ""
    first_token_timeout_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFinished:
    """The good end of a sequence, as the scheduler tells it."""

    reason: FinishReason
    stop_token_id: int | None
    stats: SequenceStats


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOddities:
    """What models did not do as their dialect wants it; fields of glm.v1.OutputOddities."""

    num_unclosed_reasoning: int = 0
    num_dropped_calls: int = 0
    num_unreadable_calls: int = 0

    @property
    def found(self) -> dict[str, int]:
        """Those that there are."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFinished:
    """The good end of a request."""

    stats: SequenceStats
    reason: FinishReason
    object_json: bytes = b""
    oddities: OutputOddities = OutputOddities()


TextEnd = TextFinished | RequestError
