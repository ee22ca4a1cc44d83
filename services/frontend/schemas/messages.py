"""Bodies of POST /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from services.frontend.schemas.chat import MAX_MESSAGES, ChatRequest, FunctionSpec, Tool
from services.frontend.schemas.fields import (
    JsonObject,
    Label,
    RequestFields,
    StrictModel,
    check_stops,
)

MAX_TOOLS = 128
MAX_STOP_SEQUENCES = 16  # OutputSpec.stop of glm.v1
BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


StopSequences = Annotated[
    list[str],
    Field(max_length=MAX_STOP_SEQUENCES),
    BeforeValidator(lambda value: check_stops(value, MAX_STOP_SEQUENCES)),
]


# Twice as long as in OpenAI's API.
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class CacheControl(StrictModel):
    """Where a prefix ends that is to be cached; prefixes are cached without being asked."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(StrictModel):
    """Earlier thinking of the assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, description="As it came; it is not checked.")


class RedactedThinkingBlock(StrictModel):
    """Thinking that another server hid; this model cannot read it, so it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: CacheControl | None = None


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    return "(blocks)" if isinstance(value, list) else None


Texts = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[TextBlock], Tag("(blocks)")],
    Discriminator(_content_kind),
]


class ToolResultBlock(StrictModel):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = Field(None, description="Text only.")
    is_error: bool | None = None
    cache_control: CacheControl | None = None


def _block_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"({kind})" if kind in BLOCK_TYPES else "(text)"


Block = Annotated[
    Annotated[TextBlock, Tag("(text)")]
    | Annotated[ThinkingBlock, Tag("(thinking)")]
    | Annotated[RedactedThinkingBlock, Tag("(redacted_thinking)")]
    | Annotated[ToolUseBlock, Tag("(tool_use)")]
    | Annotated[ToolResultBlock, Tag("(tool_result)")],
    Discriminator(_block_kind),
]
Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Block], Tag("(blocks)")],
    Discriminator(_content_kind),
]


class InputMessage(StrictModel):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ClientTool(StrictModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = Field(None, description="Tools that a server runs: refused.")
    name: ToolName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    defer_loading: bool | None = Field(None, description="Only false.")
    cache_control: CacheControl | None = None


class ToolChoiceSpec(StrictModel):
    """Which calls are allowed."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With `tool`.")
    disable_parallel_tool_use: bool | None = None


class ThinkingSpec(StrictModel):
    """Whether and how long the model thinks; without it, as it likes."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Less than `max_tokens`.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` hides the thinking; else it is shown whole."
    )


class OutputConfig(StrictModel):
    """How much work goes into the answer, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonObject | None = Field(None, description="As `response_format` of chats.")


class ContextEdit(StrictModel):
    """What is to be cut from the conversation before the model sees it."""

    type: str
    keep: Any = None


class ContextManagement(StrictModel):
    """Only the wish to keep earlier thinking is served."""

    edits: list[ContextEdit] | None = Field(None, max_length=8)


class CountTokensRequest(StrictModel):
    """A conversation whose tokens are counted."""

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceSpec | None = None
    thinking: ThinkingSpec | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: JsonObject | None = None


class MessagesRequest(RequestFields):
    """A conversation to go on with."""

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int = Field(ge=1, description="Most tokens to generate, thinking included.")
    system: Texts | None = None
    stop_sequences: StopSequences | None = None
    metadata: dict[str, Label | None] | None = Field(  # type: ignore[assignment]  # null is a value
        None, max_length=16, description="`user_id` and other labels."
    )
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceSpec | None = None
    thinking: ThinkingSpec | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: JsonObject | None = None


class NamedFunction(FunctionSpec):
    """A tool of the client as chats know it, with a name of this API."""

    name: ToolName


class NamedTool(Tool):
    """One such tool."""

    function: NamedFunction


class MessageChat(ChatRequest):
    """The chat that is made from a conversation."""

    tools: list[NamedTool] | None = Field(None, max_length=MAX_TOOLS)  # type: ignore[assignment]
