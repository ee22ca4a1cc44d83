"""Every row of bad input that a client of OpenAI's API or of vLLM may send, and our whole answer.

Status, type, `param` and code of each; where vLLM answers otherwise the row says what it does.
"""

from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.services.frontend.conftest import MODEL_DIR, NAME, Mesh

OK = 503  # the lone gateway has no detokenizer: what gets so far was accepted
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
INVALID = "invalid_request_error"


def asked(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def calling(**function: Any) -> dict[str, Any]:
    """A history with one call and its answer."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", **function}}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "12"}
    return asked(USER, {"role": "assistant", "content": None, "tool_calls": [call]}, answer)


@dataclass(frozen=True)
class Row:
    """Fields that replace those of a good body, and the answer; `peer` is what vLLM does."""

    fields: dict[str, Any]
    status: int = 400
    param: str | None = None
    code: str | None = None
    peer: str = "400"

    def __str__(self) -> str:
        return str(self.fields)[:70]


def bad(fields: dict[str, Any], param: str | None, code: str, peer: str = "400") -> Row:
    return Row(fields, 400, param, code, peer)


def fine(fields: dict[str, Any], peer: str = "200") -> Row:
    return Row(fields, OK, None, "service_unavailable", peer)


CHAT = [
    # messages
    bad({"messages": None}, "messages", "invalid_type"),
    bad({"messages": []}, "messages", "empty_array"),
    bad({"messages": "Hi"}, "messages", "invalid_type"),
    bad({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    bad(asked({"content": "Hi"}), "messages[0].role", "missing_required_parameter"),
    bad(asked({**USER, "content": None}), "messages[0].content", "invalid_type"),
    bad(asked({**USER, "content": 5}), "messages[0].content", "invalid_type"),
    bad(asked({"role": "tool", "content": None}), "messages[0].tool_call_id",
        "missing_required_parameter"),
    bad(asked({**USER, "role": "robot"}), "messages[0].role", "invalid_value", "200, dropped"),
    bad(asked({"role": "user"}), "messages[0].content", "missing_required_parameter", "200"),
    bad(asked({**USER, "content": []}), "messages[0].content", "empty_array", "200"),
    bad(asked({**USER, "content": [{"type": "smell"}]}), "messages[0].content[0].type",
        "invalid_value"),
    bad(asked({**USER, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
        "messages[0].content[0].type", "invalid_value"),
    bad(asked(USER, {"role": "tool", "content": "x"}), "messages[1].tool_call_id",
        "missing_required_parameter", "200"),
    bad(asked(USER, {"role": "tool", "content": "x", "tool_call_id": "c"}), "messages[1].role",
        "invalid_value", "200"),
    bad(asked(USER, {"role": "assistant", "tool_calls": [CALL]}), "messages[1].role",
        "invalid_value", "200"),
    # What a server may have produced is taken back, whole or cut.
    *(fine(calling(arguments=text)) for text in ("{", "[1]", "", "5", '{"a": "\\ud800"}')),
    fine(calling(arguments='{"a": ' + "[" * 500 + "]" * 500 + "}")),
    bad(calling(arguments=[]), "messages[1].tool_calls[0].function.arguments", "invalid_type"),
    bad(asked(USER, {"role": "assistant", "tool_calls": [{"id": "c"}]}),
        "messages[1].tool_calls[0].function", "missing_required_parameter"),
    # model
    Row({"model": "gpt-9"}, 404, "model", "model_not_found", "404"),
    fine({"model": None}),
    # sampling
    *(bad({"temperature": value}, "temperature", f"decimal_{side}_value")
      for value, side in ((-1, "below_min"), (3, "above_max"))),
    bad({"temperature": "hot"}, "temperature", "invalid_type"),
    bad({"temperature": "0.5"}, "temperature", "invalid_type", "200, coerced"),
    bad({"top_p": 0}, "top_p", "decimal_below_min_value"),
    bad({"top_p": 1.5}, "top_p", "decimal_above_max_value"),
    bad({"top_k": -2}, "top_k", "integer_below_min_value"),
    bad({"top_k": 1.5}, "top_k", "invalid_type"),
    bad({"min_p": 2}, "min_p", "decimal_above_max_value"),
    bad({"repetition_penalty": 0}, "repetition_penalty", "decimal_below_min_value"),
    bad({"presence_penalty": 3}, "presence_penalty", "decimal_above_max_value"),
    bad({"frequency_penalty": -3}, "frequency_penalty", "decimal_below_min_value"),
    bad({"n": 0}, "n", "integer_below_min_value"),
    bad({"n": -1}, "n", "integer_below_min_value"),
    bad({"n": 100000}, "n", "integer_above_max_value"),
    fine({"n": 2, "temperature": 0}, "400"),
    fine({"n": None}),
    bad({"seed": "1"}, "seed", "invalid_type"),
    bad({"seed": 2**63}, "seed", "integer_above_max_value"),
    # length
    bad({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    bad({"max_tokens": -1}, "max_tokens", "integer_below_min_value"),
    bad({"max_tokens": 10**6}, "messages", "context_length_exceeded"),
    bad({"max_tokens": 8192}, "messages", "context_length_exceeded", "200, clipped"),
    bad(asked({**USER, "content": "word " * 9000}), "messages", "context_length_exceeded"),
    bad({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
    bad({"min_tokens": -1}, "min_tokens", "integer_below_min_value"),
    bad({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    bad({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "integer_below_min_value"),
    bad({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "invalid_value"),
    # stops and ids
    bad({"stop": ""}, "stop", "invalid_value"),
    bad({"stop": [""]}, "stop", "invalid_value"),
    bad({"stop": list("abcde")}, "stop", "array_above_max_length"),
    bad({"stop": 5}, "stop", "invalid_type"),
    bad({"stop_token_ids": [10**6]}, "stop_token_ids", "invalid_value"),
    bad({"allowed_token_ids": [10**6]}, "allowed_token_ids", "invalid_value"),
    bad({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
    bad({"logit_bias": {"1000000": 1}}, "logit_bias", "invalid_value"),
    bad({"logit_bias": {"5": 200}}, "logit_bias.5", "decimal_above_max_value", "200, clamped"),
    bad({"logit_bias": {"01": 5, "1": -5}}, "logit_bias", "invalid_value", "200, one of them"),
    fine({"logit_bias": {"01": 5}}),
    bad({"logit_bias": {"abc": 1}}, "logit_bias", "invalid_value"),
    bad({"bad_words": [""]}, "bad_words[0]", "string_below_min_length"),
    # logprobs
    bad({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    bad({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "integer_above_max_value"),
    bad({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "integer_below_min_value"),
    bad({"logprobs": 5}, "logprobs", "invalid_type"),
    bad({"logprobs": 1}, "logprobs", "invalid_type", "200"),
    # formats and tools
    bad({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    bad({"response_format": "json"}, "response_format", "invalid_type"),
    bad({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
        "missing_required_parameter"),
    bad({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name", "missing_required_parameter"),
    bad({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema", "missing_required_parameter"),
    # What a schema or an expression means the worker says: tests/e2e/test_structured_output.py.
    fine({"response_format": {"type": "json_object"}}),  # though nobody says "json"
    bad({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs",
        "invalid_value"),
    bad({"structured_outputs": {}}, "structured_outputs", "invalid_value"),
    bad({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty_array"),
    bad({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]", "empty_string"),
    bad({"tools": []}, "tools", "empty_array"),
    bad({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    bad({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name",
        "missing_required_parameter"),
    bad({"tools": [{**TOOL, "type": "web"}]}, "tools[0].type", "invalid_value"),
    bad({"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
        "tools[0].function.parameters", "invalid_type"),
    bad({"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name", "invalid_value", "200"),
    bad({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value", "200"),
    bad({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    bad({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    bad({"tools": [TOOL], "tool_choice": "bogus"}, "tool_choice", "invalid_value"),
    bad({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "a"}}},
        "tool_choice.function.name", "invalid_value"),
    bad({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function.name",
        "missing_required_parameter"),
    fine({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [TOOL]}}}, "400"),
    # the rest
    bad({"stream_options": {}}, "stream_options", "invalid_value"),
    fine({"no_such_field": 1}),  # and named in a header, see below
    bad({"user": 5}, "user", "invalid_type"),
    bad({"reasoning_effort": "bogus"}, "reasoning_effort", "invalid_value"),
    bad({"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message", "invalid_value"),
    bad({"continue_final_message": True, "add_generation_prompt": False,
         "messages": [{**USER, "content": " "}]}, "messages[0].content", "invalid_value"),
    bad({"chat_template": "x"}, "chat_template", "unsupported_value"),
    bad({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template",
        "unsupported_value"),
    bad({"cache_salt": ""}, "cache_salt", "string_below_min_length"),
    bad({"cache_salt": "a" * 129}, "cache_salt", "string_above_max_length"),
    bad({"cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    bad({"thinking_token_budget": -5}, "thinking_token_budget", "integer_below_min_value"),
    bad({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    bad({"prompt_logprobs": -3}, "prompt_logprobs", "integer_below_min_value"),
    bad({"prompt_logprobs": 50}, "prompt_logprobs", "integer_above_max_value"),
    bad({"stream_interval": 0}, "stream_interval", "unsupported_value"),
]  # fmt: skip

COMPLETIONS = [
    bad({"prompt": None}, "prompt", "invalid_type"),
    bad({"prompt": [5, "a"]}, "prompt", "invalid_type"),
    bad({"prompt": [-1]}, "prompt", "invalid_value"),
    bad({"prompt": ""}, "prompt", "empty_string"),
    bad({"prompt": []}, "prompt", "empty_array"),
    bad({"prompt": [[]]}, "prompt", "empty_array"),
    bad({"prompt": [""]}, "prompt", "empty_string"),
    bad({"prompt": [10**6]}, "prompt", "invalid_value"),
    bad({"suffix": "x"}, "suffix", "unsupported_value"),
    bad({"logprobs": 21}, "logprobs", "integer_above_max_value"),
    bad({"stream": True, "use_beam_search": True}, "use_beam_search", "unsupported_value"),
    bad({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    fine({"max_tokens": 0, "echo": True}),
]


def check(response: httpx.Response, row: Row) -> None:
    error = response.json()["error"]
    found = (response.status_code, error["param"], error["code"])
    assert found == (row.status, row.param, row.code)
    assert error["type"] == ("server_error" if row.status == OK else INVALID)
    assert isinstance(error["message"], str)
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("row", CHAT, ids=str)
async def test_each_row_of_chats_has_its_answer(lone: httpx.AsyncClient, row: Row) -> None:
    body = {"model": NAME, "messages": [USER], **row.fields}
    check(await lone.post("/v1/chat/completions", json=body), row)


async def test_a_completion_needs_a_prompt(lone: httpx.AsyncClient) -> None:
    row = bad({}, "prompt", "missing_required_parameter")
    check(await lone.post("/v1/completions", json={"model": NAME}), row)


@pytest.mark.parametrize("row", COMPLETIONS, ids=str)
async def test_each_row_of_completions_has_its_answer(lone: httpx.AsyncClient, row: Row) -> None:
    body = {"model": NAME, "prompt": "Hi", **row.fields}
    check(await lone.post("/v1/completions", json=body), row)


BODIES = [
    (b'{"messages": ', "application/json", Row({}, 400, None, "invalid_json")),
    (b"", "application/json", Row({}, 400, None, "invalid_json")),
    (b"null", "application/json", Row({}, 400, None, "invalid_type")),
    (b"{}", "text/plain", Row({}, 400, None, "invalid_content_type")),
    (b"a=b", "application/x-www-form-urlencoded", Row({}, 400, None, "invalid_content_type")),
    (b"{}", "", Row({}, 400, None, "invalid_content_type")),
    (b"\xff", "application/json", Row({}, 400, None, "invalid_utf8", "400, another shape")),
    (b'{"temperature": NaN}', "application/json", Row({}, 400, "temperature", "invalid_value")),
    (b'{"temperature": Infinity}', "application/json",
     Row({}, 400, "temperature", "invalid_value")),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "application/json",
     Row({}, 400, "messages[0].content", "invalid_value")),
    (b"{}", "application/json", Row({}, 400, "messages", "missing_required_parameter")),
]  # fmt: skip


@pytest.mark.parametrize(("data", "kind", "row"), BODIES, ids=lambda v: repr(v)[:40])
async def test_each_row_of_broken_bodies_has_its_answer(
    lone: httpx.AsyncClient, data: bytes, kind: str, row: Row
) -> None:
    headers = {"content-type": kind} if kind else {}
    check(await lone.post("/v1/chat/completions", content=data, headers=headers), row)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ],
)
async def test_what_the_framework_refuses_has_the_same_envelope(
    lone: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await lone.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_field_nobody_knows_is_named_in_a_header(mesh: Mesh) -> None:
    response = await mesh.chat(no_such_field=1)
    assert response.status_code == 200
    assert response.headers["x-unknown-fields"] == "no_such_field"


class TestKeys:
    """A gateway with keys; vLLM answers `{"error": "Unauthorized"}`."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"api_key": ["secret"], "model": MODEL_DIR}

    @pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
    async def test_no_key_and_a_wrong_one_have_the_envelope(
        self, mesh: Mesh, headers: dict[str, str]
    ) -> None:
        response = await mesh.http.get("/v1/models", headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (
            401,
            INVALID,
            "invalid_api_key",
        )
