"""Every field of the APIs that clients know is served or refused by name, none only warned of."""

import typing
from typing import Any

import anthropic.types.beta.message_count_tokens_params as beta_count_params
import anthropic.types.beta.message_create_params as beta_message_params
import anthropic.types.message_count_tokens_params as count_params
import anthropic.types.message_create_params as message_params
import httpx
import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from pydantic import BaseModel

from services.frontend import not_served
from services.frontend.fields import sort_extra
from services.frontend.not_served import Table
from services.frontend.schemas.chat import ChatRequest
from services.frontend.schemas.completions import CompletionRequest
from services.frontend.schemas.generate import GenerateRequest, SamplingParams
from services.frontend.schemas.messages import CountTokensRequest, MessagesRequest
from services.frontend.schemas.responses import ResponsesRequest
from services.frontend.schemas.tokenize import TokenizeRequest
from services.frontend.validation import parse

# Names of fields in the bodies of vLLM 0.32.
VLLM_SAMPLING = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    prompt_logprob_token_ids prompt_logprob_start flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind skip_clone
    output_text_buffer_length logit_bias allowed_token_ids extra_args bad_words
    structured_outputs thinking_token_budget skip_reading_prefix_cache repetition_detection
    routed_experts_prompt_start logprob_token_ids watermarking trace_decode_token_ids
"""
_VLLM_SHARED = """
    model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format seed
    stop stream stream_options temperature top_p user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets
    mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs
    repetition_detection stream_interval thinking_token_budget
"""
VLLM_CHAT = (
    _VLLM_SHARED
    + """
    messages top_logprobs max_completion_tokens tools tool_choice reasoning_effort
    include_reasoning parallel_tool_calls add_generation_prompt continue_final_message documents
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
    best_of early_stopping guided_decoding_backend
"""
)
VLLM_COMPLETION = _VLLM_SHARED + " prompt suffix prompt_embeds"
VLLM_RESPONSE = """
    background include input instructions max_output_tokens max_tool_calls metadata model
    logit_bias parallel_tool_calls previous_response_id prompt reasoning include_reasoning
    service_tier store stream temperature text tool_choice tools top_logprobs top_p top_k min_p
    truncation user skip_special_tokens include_stop_str_in_output presence_penalty
    frequency_penalty prompt_cache_key watermarking request_id session_id media_io_kwargs
    mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt enable_response_messages
    previous_input_messages structured_outputs repetition_penalty seed stop stop_token_ids
    ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs
"""
VLLM_MESSAGES = """
    model messages max_tokens metadata output_config thinking stop_sequences stream system
    temperature tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking
    kv_transfer_params ec_transfer_params vllm_xargs chat_template_kwargs
"""
VLLM_COUNT = "model messages output_config system thinking tool_choice tools chat_template_kwargs"
VLLM_GENERATE = """
    request_id token_ids token_offsets features content_parts sampling_params model
    reasoning_ended reasoning_parser_kwargs return_token_ids output_mode stream stream_options
    cache_salt priority kv_transfer_params ec_transfer_params
"""
VLLM_TOKENIZE = """
    model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    tools
"""
TURNS = [{"role": "user", "content": "Hi"}]
# What is judged by its value, not by its name alone; `betas` of the SDK is a header.
BY_VALUE = {"cache_control", "thread", "betas"}


def names_of(*params: type) -> list[str]:
    """Fields of a typed dictionary of an SDK."""
    return [name for one in params for name in typing.get_type_hints(one)]


CASES: list[tuple[str, str, type[BaseModel], Table, dict[str, Any], list[str]]] = [
    (
        "chat", "/v1/chat/completions", ChatRequest, not_served.CHAT_NOT_SERVED,
        {"messages": TURNS},
        [*VLLM_CHAT.split(), *names_of(chat_params.CompletionCreateParamsNonStreaming)],
    ),
    (
        "chat render", "/v1/chat/completions/render", ChatRequest, not_served.CHAT_NOT_SERVED,
        {"messages": TURNS}, [],
    ),
    (
        "completion", "/v1/completions", CompletionRequest, not_served.COMPLETION_NOT_SERVED,
        {"prompt": "Hi"},
        [*VLLM_COMPLETION.split(), *names_of(completion_params.CompletionCreateParamsNonStreaming)],
    ),
    (
        "response", "/v1/responses", ResponsesRequest, not_served.RESPONSE_NOT_SERVED,
        {"input": "Hi"},
        [*VLLM_RESPONSE.split(), *names_of(response_params.ResponseCreateParamsNonStreaming)],
    ),
    (
        "messages", "/v1/messages", MessagesRequest, not_served.MESSAGES_NOT_SERVED,
        {"model": "nano", "max_tokens": 9, "messages": TURNS},
        [
            *VLLM_MESSAGES.split(),
            *names_of(
                message_params.MessageCreateParamsNonStreaming,
                beta_message_params.MessageCreateParamsNonStreaming,
            ),
        ],
    ),
    (
        "count", "/v1/messages/count_tokens", CountTokensRequest, not_served.MESSAGES_NOT_SERVED,
        {"model": "nano", "messages": TURNS},
        [
            *VLLM_COUNT.split(),
            *names_of(
                count_params.MessageCountTokensParams, beta_count_params.MessageCountTokensParams
            ),
        ],
    ),
    (
        "generate", "/inference/v1/generate", GenerateRequest, not_served.GENERATE_NOT_SERVED,
        {"token_ids": [5]}, VLLM_GENERATE.split(),
    ),
    (
        "sampling", "/inference/v1/generate", SamplingParams, not_served.SAMPLING_NOT_SERVED,
        {"token_ids": [5]}, VLLM_SAMPLING.split(),
    ),
    (
        "tokenize", "/tokenize", TokenizeRequest, not_served.TOKENIZE_NOT_SERVED,
        {"prompt": "Hi"}, VLLM_TOKENIZE.split(),
    ),
]  # fmt: skip
TABLES = pytest.mark.parametrize(
    ("name", "url", "model", "table", "body", "known"), CASES, ids=[case[0] for case in CASES]
)


@TABLES
def test_every_field_of_a_known_api_is_served_or_listed(
    name: str, url: str, model: type[BaseModel], table: Table, body: Any, known: list[str]
) -> None:
    assert [one for one in known if one not in {*model.model_fields, *table, *BY_VALUE}] == []
    assert not set(model.model_fields) & set(table)


@TABLES
async def test_each_listed_field_is_refused_by_name(
    lone: httpx.AsyncClient,
    name: str,
    url: str,
    model: type[BaseModel],
    table: Table,
    body: Any,
    known: list[str],
) -> None:
    for field in table:
        # No table takes this text for a value that asks for nothing.
        asked = {field: "something"}
        path = f"sampling_params.{field}" if name == "sampling" else field
        sent = {**body, **({"sampling_params": asked} if name == "sampling" else asked)}
        response = await lone.post(url, json=sent)
        error = response.json()["error"]
        assert response.status_code == 400, (field, response.text)
        assert f"'{path}' is not supported" in error["message"]
        if "/messages" not in url:
            assert (error["param"], error["code"]) == (path, "unsupported_value")


@TABLES
def test_a_value_that_asks_for_nothing_is_taken(
    name: str, url: str, model: type[BaseModel], table: Table, body: Any, known: list[str]
) -> None:
    start = {} if name == "sampling" else body
    for field, values in table.items():
        for value in (None, *values):
            assert sort_extra(parse(model, {**start, field: value}), table) == []


FUNCTION = {"type": "function", "name": "f"}
CHAT_TOOL = {"type": "function", "function": {"name": "f"}}
NESTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        {"messages": TURNS, "tools": [{**CHAT_TOOL, "defer_loading": True}]},
        "tools[0].defer_loading",
    ),
    (
        "/v1/chat/completions",
        {
            "messages": TURNS,
            "tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}],
        },
        "tools[0].function.defer_loading",
    ),
    *(
        ("/v1/responses", {"input": "Hi", "tools": [{**FUNCTION, name: 5}]}, f"tools[0].{name}")
        for name in not_served.RESPONSE_TOOL_NOT_SERVED
    ),
    *(
        ("/v1/responses", {"input": "Hi", "reasoning": {name: "pro"}}, f"reasoning.{name}")
        for name in not_served.REASONING_NOT_SERVED
    ),
    *(
        (
            "/v1/messages",
            {
                **{"model": "nano", "max_tokens": 9, "messages": TURNS},
                "tools": [{"name": "f", "input_schema": {}, name: 5}],
            },
            f"tools[0].{name}",
        )
        for name in not_served.MESSAGES_TOOL_NOT_SERVED
    ),
    (
        "/v1/messages",
        {
            **{"model": "nano", "max_tokens": 9, "messages": TURNS},
            "thinking": {"type": "disabled", "block_binding": {}},
        },
        "thinking.block_binding",
    ),
    (
        "/v1/messages/count_tokens",
        {"model": "nano", "messages": TURNS, "output_config": {"task_budget": {}}},
        "output_config.task_budget",
    ),
]


@pytest.mark.parametrize(("url", "body", "path"), NESTED, ids=[path for _, _, path in NESTED])
async def test_so_is_a_field_of_a_part(
    lone: httpx.AsyncClient, url: str, body: dict[str, Any], path: str
) -> None:
    response = await lone.post(url, json=body)
    assert response.status_code == 400
    assert f"'{path}' is not supported" in response.json()["error"]["message"]


@pytest.mark.parametrize("url", ["/v1/completions/render", "/v1/chat/completions/render"])
async def test_a_render_has_no_echo(lone: httpx.AsyncClient, url: str) -> None:
    body = {"messages": TURNS} if "chat" in url else {"prompt": "Hi"}
    for echo, status in ((True, 400), (False, 200), (None, 200)):
        response = await lone.post(url, json={**body, "echo": echo})
        assert response.status_code == status, response.text
    error = (await lone.post(url, json={**body, "echo": True})).json()["error"]
    assert (error["param"], error["code"]) == ("echo", "unsupported_value")
