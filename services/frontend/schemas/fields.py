"""Request fields that chat and completions share, with OpenAI's strictness and limits.

No coercion: "0.5" is no number and 1 is no boolean. `null` always means absent. Fields that no
model here names stay in `model_extra`; `services.frontend.fields` decides what becomes of them.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS: Final = 4
MAX_STOP_BYTES: Final = 256  # OutputSpec.stop of glm.v1
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20
MAX_ID_LIST: Final = 1024
MAX_ALLOWED_IDS: Final = 8192  # SamplingParams.allowed_token_ids of glm.v1
MAX_BAD_WORDS: Final = 64
MAX_LABELS: Final = 16
_INT64: Final = 2**63
_INT32: Final = 2**31

Priority = Annotated[int, Field(ge=-_INT32, le=_INT32 - 1)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]*$")]
# Printable: it stands in headers and logs.
RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
# Noted in the trace of the request, otherwise without effect.
Label = Annotated[str, Field(max_length=512)]


JsonObject = dict[str, Any]


class StrictModel(BaseModel):
    """Strict types, unknown fields kept aside."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


def check_stops(value: object, limit: int) -> object:
    """One string or a list of at most `limit` of them, as a list."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise PydanticCustomError("invalid_type", "expected a string or an array of strings")
    if len(stops) > limit:
        raise PydanticCustomError(
            "array_above_max_length",
            "expected at most {limit} strings, got {count}",
            {"limit": limit, "count": len(stops)},
        )
    for stop in stops:
        if isinstance(stop, str) and not 0 < len(stop.encode("utf-8", "replace")) <= MAX_STOP_BYTES:
            raise PydanticCustomError(
                "invalid_value", "a stop string has 1 to {limit} bytes", {"limit": MAX_STOP_BYTES}
            )
    return stops


Stop = Annotated[
    list[str],
    BeforeValidator(lambda value: check_stops(value, MAX_STOP_STRINGS)),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class StreamOptions(StrictModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = Field(
        None, description="One last chunk with `choices: []` and the usage of all choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Usage in every chunk; needs `include_usage`."
    )


class Replay(StrictModel):
    """What a replay worker emits in place of a model; only with `--worker-mode replay`."""

    text: str | None = Field(
        None, description="Output text; spellings of control tokens become control tokens."
    )
    token_ids: list[int] | None = Field(None, description="Output ids, in place of `text`.")
    tokens_per_step: list[Annotated[int, Field(ge=1, le=4096)]] | None = Field(
        None, min_length=1, max_length=4096, description="Tokens per step, cycled; 1 by default."
    )


class StructuredOutputs(StrictModel):
    """What the text has to be: exactly one of the first six."""

    json_: Any = Field(None, alias="json", description="A JSON Schema, or the text of one.")
    regex: str | None = Field(None, description="The whole text matches it.")
    choice: list[str] | None = Field(None, description="The text is one of these.")
    grammar: str | None = Field(None, description="In the notation of Lark or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: Any = Field(None, description="As `response_format`, or the text of it.")
    disable_any_whitespace: bool | None = Field(None, description="JSON without blanks.")
    disable_additional_properties: bool | None = Field(
        None, description="Objects have declared properties only."
    )
    whitespace_pattern: str | None = Field(
        None, min_length=1, max_length=256, description="What stands between parts of JSON."
    )


class SamplingFields(StrictModel):
    """How tokens are chosen and where the output ends."""

    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy. Default from the checkpoint."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="Nucleus mass. Default from the checkpoint."
    )
    top_k: int | None = Field(None, ge=-1, description="0 and -1 are off.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Least probability, as a share of the best token's."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="1 is off.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_ID_LIST, description="Token id to shift of its logit."
    )
    seed: int | None = Field(
        None,
        ge=-_INT64,
        le=_INT64 - 1,
        description="Same seed, same answer. Choice i > 0 uses a seed derived from it and i.",
    )
    stop: Stop | None = Field(
        None, description=f"Up to {MAX_STOP_STRINGS} strings that end the content."
    )
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_ID_LIST)
    include_stop_str_in_output: bool | None = Field(None)
    ignore_eos: bool | None = Field(None, description="Let end tokens pass as ordinary ones.")
    allowed_token_ids: list[int] | None = Field(
        None,
        min_length=1,
        max_length=MAX_ALLOWED_IDS,
        description="Only these ids may be generated.",
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Texts that may not be generated."
    )
    min_tokens: int | None = Field(None, ge=0, description="No stop before this many tokens.")
    structured_outputs: StructuredOutputs | None = Field(None, description="As vLLM's.")
    guided_json: Any = Field(None, description="Older name of `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="Of `structured_outputs.regex`.")
    guided_choice: list[str] | None = Field(None, description="Of `structured_outputs.choice`.")
    guided_grammar: str | None = Field(None, description="Of `structured_outputs.grammar`.")
    guided_whitespace_pattern: str | None = Field(
        None, min_length=1, max_length=256, description="Needs `guided_json`."
    )


class RequestFields(SamplingFields):
    """Fields of every endpoint that generates for people."""

    model: str | None = Field(None, description="A served name; absent means the served model.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    priority: Priority | None = Field(None, description="Smaller is earlier; 0.")
    first_token_timeout_ms: int | None = Field(
        None,
        ge=1,
        le=_INT32 - 1,
        description="For the first token to come: refused where it surely cannot, else failed.",
    )
    cache_salt: CacheSalt | None = Field(None, description="Separates prefix caches.")
    user: Label | None = Field(None, description="A label; no effect on the answer.")
    safety_identifier: Label | None = Field(None, description="A label, as `user`.")
    prompt_cache_key: Label | None = Field(
        None, description="A label; equal prefixes are shared without it."
    )
    session_id: Label | None = Field(None, description="A label.")
    metadata: dict[str, Label] | None = Field(None, max_length=MAX_LABELS, description="Labels.")
    request_id: RequestId | None = Field(
        None, description="The caller's label; the header x-request-id wins."
    )
    replay: Replay | None = Field(None, description="See `Replay`.")


class GenerationFields(RequestFields):
    """Fields of chats and completions."""

    stream_options: StreamOptions | None = Field(None, description="Needs `stream: true`.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Choices per prompt; 1.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens to generate.")
    response_format: JsonObject | None = Field(
        None, description="`text`, `json_object`, `json_schema` or `structural_tag`."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Alternatives per prompt token; not streamed."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out where no output parser runs; true."
    )
    spaces_between_special_tokens: bool | None = Field(
        None, description="This tokenizer puts none: both values mean the same."
    )
    return_token_ids: bool | None = Field(
        None, description="Ids of prompt and output beside the text."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Tokens of logprobs as "token_id:N".'
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Cut the prompt to so many tokens; -1: to what fits."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end of the prompt is cut off; left."
    )
