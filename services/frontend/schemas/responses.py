"""The body of POST /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from services.frontend.schemas.chat import MAX_MESSAGES, ReasoningEffort, RefusalPart
from services.frontend.schemas.fields import JsonObject, RequestFields, StrictModel

MAX_TOOLS = 128
# Kinds of input items; the others of the API belong to tools that run at the provider.
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
OTHER_ITEM_TYPES = frozenset(
    {
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "computer_call", "computer_call_output", "custom_tool_call", "custom_tool_call_output",
        "file_search_call", "image_generation_call", "item_reference", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "mcp_list_tools", "shell_call", "shell_call_output", "web_search_call",
    }
)  # fmt: skip


class InputPart(StrictModel):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text"] = Field(description="Text only.")
    text: str


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    return "(parts)" if isinstance(value, list) else None


def _part_kind(value: object) -> str:
    is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
    return "(refusal)" if is_refusal else "(part)"


Part = Annotated[
    Annotated[InputPart, Tag("(part)")] | Annotated[RefusalPart, Tag("(refusal)")],
    Discriminator(_part_kind),
]
Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Part], Field(min_length=1), Tag("(parts)")],
    Discriminator(_content_kind),
]

# What a call gave may be nothing.
Output = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Part], Tag("(parts)")],
    Discriminator(_content_kind),
]


class MessageItem(StrictModel):
    """Something that somebody said."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(StrictModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class FunctionCallOutputItem(StrictModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Output
    id: str | None = None
    status: str | None = None


class ReasoningText(StrictModel):
    """A piece of thinking."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(StrictModel):
    """A piece of a summary of thinking."""

    type: Literal["summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """Thinking before the assistant's next words."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = Field(None, description="As this server gave it.")
    status: str | None = None


def _item_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"({kind})" if kind in ITEM_TYPES else "(message)"


Item = Annotated[
    Annotated[MessageItem, Tag("(message)")]
    | Annotated[FunctionCallItem, Tag("(function_call)")]
    | Annotated[FunctionCallOutputItem, Tag("(function_call_output)")]
    | Annotated[ReasoningItem, Tag("(reasoning)")],
    Discriminator(_item_kind),
]


def _input_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    return "(items)" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[Item], Field(max_length=MAX_MESSAGES), Tag("(items)")],
    Discriminator(_input_kind),
]


class Reasoning(StrictModel):
    """How much the model thinks."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="`auto` gives none: the thinking itself is shown."
    )


class TextOptions(StrictModel):
    """What the text looks like."""

    format: JsonObject | None = Field(None, description='`{"type": "text"}` and others.')
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="`medium`.")


class ResponseStreamOptions(StrictModel):
    """What a stream carries besides the answer."""

    include_obfuscation: bool | None = Field(None, description="Only false.")


class FunctionTool(StrictModel):
    """A function the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponsesRequest(RequestFields):
    """Input to answer."""

    input: Input = Field(description="A text, or items in order.")
    instructions: str | None = Field(None, description="Said first, not part of what is stored.")
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool | None = Field(None, description="Keep the response for a while; true.")
    background: bool | None = Field(None, description="Answer at once, work on; needs `store`.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Needs `stream`.")
    include: list[str] | None = Field(None, max_length=16)
    max_output_tokens: int | None = Field(None, ge=1, description="Default: the room left.")
    max_tool_calls: int | None = Field(
        None, ge=1, description="Bounds tools that run at the server, of which there are none."
    )
    parallel_tool_calls: bool | None = Field(None, description="false keeps the first call only.")
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
    ] = Field(None, description="As in the chat endpoint.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Needs `include: [message.output_text.logprobs]`."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` drops turns from the beginning until the rest fits."
    )
    chat_template_kwargs: JsonObject | None = Field(None, description="As in the chat endpoint.")
    include_reasoning: bool | None = Field(None, description="false hides the thinking.")
    thinking_token_budget: int | None = Field(None, ge=-1, description="As in the chat endpoint.")
