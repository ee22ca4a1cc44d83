"""What the frontend asks of the detokenizer, as plain values: one response with 1..N sequences.

Complete when built: every default is resolved here, later stages fill nothing in.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from shared.sampling import ReplayScript, SamplingSpec


class ObjectKind(enum.IntEnum):
    """The OpenAI object an answer becomes; the numbers are those of glm.v1."""

    CHAT_COMPLETION = 1
    TEXT_COMPLETION = 2
    RESPONSE = 3
    MESSAGE = 4
    TOKENS = 5


class ToolChoice(enum.IntEnum):
    """Which calls are allowed; the numbers are those of glm.v1.ToolChoiceMode."""

    NONE = 1
    AUTO = 2
    REQUIRED = 3
    NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTool:
    """A tool of the request; `parameters_json` is empty when no schema was given."""

    name: str
    parameters_json: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """How the output is cut, parsed and shown; fields of glm.v1.OutputSpec."""

    object_kind: ObjectKind
    response_id: str
    model: str
    created_s: int
    is_stream: bool = False
    include_usage: bool = False
    include_continuous_usage: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    parse_reasoning: bool = False
    starts_in_reasoning: bool = False
    include_reasoning: bool = True
    tools: tuple[DeclaredTool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.NONE
    # The tool that must be called, if one is named.
    tool_choice_name: str = ""
    parallel_tool_calls: bool = True
    include_logprobs: bool = False
    num_top_logprobs: int = 0
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    echo_texts: tuple[str, ...] = ()
    # What of the request stands in the object as it came: a JSON object. Of a response only.
    echo_json: bytes = b""
    # The end brings the object, also that of a stream. Of a response only.
    keep_object: bool = False
    include_sealed_reasoning: bool = False
    include_prompt_logprobs: bool = False
    # The echo alone is shown. Of completions only.
    is_prompt_only: bool = False
    # Text beside the ids. Of tokens only.
    include_text: bool = False
    # Consecutive choices that share a prompt, which usage counts once; 0: all of a chat.
    num_choices_per_prompt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One choice; `seed` replaces the sampling seed for it."""

    index: int
    prompt_token_ids: Sequence[int]
    seed: int
    replay: ReplayScript | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request; `request_id` is the id of the HTTP answer and unique for the mesh's life."""

    request_id: str
    sequences: tuple[SequencePlan, ...]
    sampling: SamplingSpec
    output: OutputPlan
    traceparent: str = ""
    timeout_ms: int = 0
    cache_salt: str = ""
    tenant_id: str = ""
    # Smaller is earlier.
    priority: int = 0
    # 0 is no limit of its own.
    first_token_timeout_ms: int = 0
    # The field of the body that asks for `sampling.constraint`, for errors.
    constraint_param: str = ""
    # How often it was submitted before, to a detokenizer that was lost since.
    attempt: int = 0
