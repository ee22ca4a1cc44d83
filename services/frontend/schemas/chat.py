"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from services.frontend.schemas.fields import GenerationFields, JsonObject, StrictModel

MAX_TOOLS = 128  # stated by the contract of glm.v1
MAX_MESSAGES = 8192
Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(StrictModel):
    """A piece of text."""

    type: Literal["text"] = Field(description="This model takes text only.")
    text: str


def _content_kind(value: object) -> str | None:
    if isinstance(value, str):
        return "(text)"
    return "(parts)" if isinstance(value, list) else None


class RefusalPart(StrictModel):
    """A refusal that another server gave; text to this model."""

    type: Literal["refusal"]
    refusal: str


def _part_kind(value: object) -> str:
    is_refusal = isinstance(value, dict) and value.get("type") == "refusal"
    return "(refusal)" if is_refusal else "(part)"


# Tags in brackets never show up in the `param` of an error.
Part = Annotated[
    Annotated[ContentPart, Tag("(part)")] | Annotated[RefusalPart, Tag("(refusal)")],
    Discriminator(_part_kind),
]
Content = Annotated[
    Annotated[str, Tag("(text)")] | Annotated[list[Part], Tag("(parts)")],
    Discriminator(_content_kind),
]


class CalledFunction(StrictModel):
    """What the assistant called."""

    name: str
    arguments: str = Field(description="JSON text, as the server gave it.")


class ToolCall(StrictModel):
    """A call in the history."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(StrictModel):
    """One message; which fields it needs depends on the role."""

    role: Role
    content: Content | None = Field(None, description="Text, or a list of text parts.")
    reasoning: str | None = Field(None, description="Earlier thinking of the assistant.")
    reasoning_content: str | None = Field(None, description="Same as `reasoning`.")
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, description="The call a tool message answers.")
    refusal: str | None = Field(None, description="Of another server; text to this model.")
    annotations: list[JsonObject] | None = Field(None, description="Of another server; no effect.")


class FunctionSpec(StrictModel):
    """A function the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(StrictModel):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: FunctionSpec


class Thinking(StrictModel):
    """The vendor's own switch; `chat_template_kwargs` wins over it."""

    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None
    budget_tokens: int | None = Field(
        None, ge=1, description="As `thinking_token_budget`, which wins."
    )


ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                {"type": "object"},
            ]
        }
    ),
]


class ChatRequest(GenerationFields):
    """A conversation to continue."""

    messages: list[ChatMessage] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation so far, in order."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Wins over `max_tokens`. Default: the room left in the context."
    )
    logprobs: bool | None = Field(None, description="Log-probabilities of the output tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs `logprobs: true`.")
    tools: list[Tool] | None = Field(
        None, min_length=1, max_length=MAX_TOOLS, description="Functions the model may call."
    )
    tool_choice: ToolChoice = Field(
        None, description="`none`, `auto`, `required`, a function or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = Field(None, description="false allows one call only.")
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="`none` switches thinking off, `high` shortens it; all else is the most.",
    )
    chat_template_kwargs: JsonObject | None = Field(
        None, description="`enable_thinking`, `clear_thinking`, `reasoning_effort`."
    )
    thinking: Thinking | None = None
    include_reasoning: bool | None = Field(None, description="false hides the thinking.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Most tokens of thinking, then it is ended; -1 is no bound."
    )
    echo: bool | None = Field(
        None, description="Begin the answer with the assistant message that is continued."
    )
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn; true.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message; needs `add_generation_prompt: false`."
    )
    add_special_tokens: bool | None = Field(
        None, description="The tokenizer adds none: both values mean the same."
    )

    @property
    def thinking_budget(self) -> int | None:
        """Most tokens of thinking, by either name."""
        if self.thinking_token_budget is not None or self.thinking is None:
            return self.thinking_token_budget
        return self.thinking.budget_tokens
