"""Bodies of POST /tokenize and /detokenize."""

from typing import Any

from pydantic import Field

from services.frontend.schemas.fields import JsonObject, StrictModel


class TokenizeRequest(StrictModel):
    """A text, or a conversation with the fields of the chat endpoint."""

    model: str | None = None
    prompt: str | None = Field(None, description="Spellings of control tokens become them.")
    messages: list[Any] | None = Field(None, description="As in /v1/chat/completions.")
    tools: list[Any] | None = None
    chat_template_kwargs: JsonObject | None = None
    thinking: JsonObject | None = Field(None, description="As in /v1/chat/completions.")
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(None, description="The tokenizer adds none.")
    return_token_strs: bool | None = Field(None, description="Vocabulary form of each token.")


class DetokenizeRequest(StrictModel):
    """Ids."""

    model: str | None = None
    tokens: list[int]
