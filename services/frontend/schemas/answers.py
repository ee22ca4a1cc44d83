"""Shapes of answers, for the documentation page and the small endpoints.

Generated answers are written by the detokenizer and pass through as bytes; the models of them here
only describe.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """Nothing to validate: these are ours."""

    model_config = ConfigDict(protected_namespaces=())


class ErrorFields(Answer):
    """What went wrong."""

    message: str = Field(description="For people.")
    type: str = Field(description="invalid_request_error, rate_limit_error or server_error.")
    param: str | None = Field(description="Path of the field, like messages[0].role.")
    code: str | None = Field(description="For programs, like context_length_exceeded.")


class ErrorAnswer(Answer):
    """The body of every answer that is not a success."""

    error: ErrorFields


class Usage(Answer):
    """Token counts over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: dict[str, int] | None = None
    prompt_tokens_details: dict[str, int] | None = None


class AnswerMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = Field(None, description="The thinking.")
    reasoning_content: str | None = Field(None, description="Same as `reasoning`.")
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Answer):
    """One continuation."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None = Field(None, description="The stop string or id that matched.")


class ChatCompletion(Answer):
    """A whole answer; a stream has chunks of `chat.completion.chunk`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None = None


class TextCompletion(Answer):
    """A whole answer; choices stand prompt by prompt, `n` each."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(Answer):
    """An answer as a list of items; what the request said stands in it, too."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    model: str
    output: list[dict[str, Any]] = Field(description="reasoning, message and function_call items.")
    usage: ResponseUsage | None


class ResponseItems(Answer):
    """A page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    """A response that was forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class MessageErrorFields(Answer):
    """What went wrong, in the Messages API's words."""

    type: str = Field(description="invalid_request_error, rate_limit_error, api_error, ...")
    message: str


class MessageError(Answer):
    """The body of answers of /v1/messages that are no success."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: str


class MessageUsage(Answer):
    """Token counts; cached tokens are not among the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Answer):
    """A whole answer as content blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="thinking, text and tool_use blocks.")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """Size of a conversation."""

    input_tokens: int


class InputTokens(Answer):
    """Size of a response's input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class RenderedRequest(Answer):
    """A body for /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    output_mode: Literal["tokens"]
    reasoning_ended: bool | None = None


class TokenChoice(Answer):
    """One continuation."""

    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: int | str | None


class TokenAnswer(Answer):
    """A whole answer."""

    id: str
    object: Literal["generate"]
    created: int
    model: str
    choices: list[TokenChoice]
    usage: Usage


class Model(Answer):
    """A served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "glm-mesh"
    root: str = Field(description="The name in answers.")
    parent: str | None = None
    max_model_len: int = Field(description="Longest prompt plus output, in tokens.")
    # The same in the words of the Messages API's SDK.
    type: Literal["model"] = "model"
    display_name: str
    created_at: str = Field(description="`created` as RFC 3339 writes it.")


class ModelList(Answer):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[Model]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class TokenizeAnswer(Answer):
    """Ids of a text or conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(Answer):
    """The text of ids."""

    prompt: str


class Health(Answer):
    """Every service of the chain is there."""

    status: Literal["ready"]


class CacheReset(Answer):
    """The answer to a reset of the prefix caches."""

    num_blocks: int = Field(description="KV blocks that could be shared before.")


class Version(Answer):
    """Version of this software."""

    version: str
