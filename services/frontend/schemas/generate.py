"""Bodies of /inference/v1/generate and answers of the render endpoints: the same object."""

from typing import Literal

from pydantic import Field

from services.frontend.schemas.fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    CacheSalt,
    JsonObject,
    Label,
    Priority,
    Replay,
    RequestId,
    SamplingFields,
    StreamOptions,
    StrictModel,
)


class SamplingParams(SamplingFields):
    """How to sample; what is absent has the checkpoint's default."""

    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices; 1.")
    max_tokens: int | None = Field(None, ge=1, description="Default: the room left.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives to report per token."
    )
    skip_special_tokens: bool | None = Field(None, description="Of the text; true.")
    response_format: JsonObject | None = Field(None, description="As of chats.")
    thinking_token_budget: int | None = Field(
        None, ge=-1, description="Most tokens of thinking, where the prompt opens a think block."
    )


class GenerateRequest(StrictModel):
    """Token ids to go on with; what a render endpoint gives can be sent as it is."""

    token_ids: list[int] = Field(min_length=1, description="The prompt.")
    model: str | None = Field(None, description="A served name.")
    sampling_params: SamplingParams | None = None
    output_mode: Literal["tokens", "text"] | None = Field(
        None, description="`text`: the text beside the ids."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs `stream: true`.")
    reasoning_ended: bool | None = Field(
        None, description="Whether the prompt ends outside a think block; found out if absent."
    )
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    request_id: RequestId | None = Field(None, description="The caller's label.")
    user: Label | None = None
    replay: Replay | None = None
