"""What a messages body may say, and the submission it becomes."""

from typing import Any

import httpx
import pytest

from protos.glm.v1 import detokenizer_pb2
from tests.services.frontend.conftest import NAME, Mesh

ACCEPTED = 503
TOOL = {"name": "now", "description": "time", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}
USE = {"type": "tool_use", "id": "t1", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "12"}
ASKING = {"role": "assistant", "content": [USE]}

# Fields, and a piece of the message: this protocol's errors have no `param`.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "'messages'"),
    ({"messages": "Hi"}, "'messages'"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "'messages[0].role'"),
    ({"messages": [{"role": "user"}]}, "'messages[0].content'"),
    ({"messages": [{"role": "user", "content": []}]}, "'messages[0].content'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "'messages[0].content[0].type'",
    ),
    ({"messages": [USER, ASKING]}, "'messages[1]'"),
    ({"messages": [USER, ASKING, USER]}, "'messages[2].content'"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "'messages[0].content[0]'"),
    ({"max_tokens": None}, "'max_tokens'"),
    ({"max_tokens": 0}, "'max_tokens'"),
    ({"max_tokens": 8192}, "prompt is too long: "),
    ({"model": None}, "'model'"),
    ({"temperature": 3}, "'temperature'"),
    ({"stop_sequences": ["x"] * 17}, "'stop_sequences'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"tools": [{"name": "now"}]}, "'tools[0].input_schema'"),
    ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "'tools[0].type'"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "'tools[0].defer_loading'"),
    ({"tools": [TOOL, TOOL]}, "is declared twice"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
    ({"thinking": {"type": "odd"}}, "'thinking.type'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 99}}, "'thinking.budget_tokens'"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "'thinking.budget_tokens'"),
    ({"output_config": {"effort": "odd"}}, "'output_config.effort'"),
    ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers'"),
    ({"system": 5}, "'system'"),
    ({"cache_control": {"type": "zz"}}, "'cache_control.type'"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "'cache_control.ttl'"),
    ({"cache_control": {}}, "'cache_control.type'"),
    ({"tools": [{**TOOL, "name": "n" * 129}]}, "'tools[0].name'"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "'tools[0].name'"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "'context_management.edits[0].type'",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 2}]}},
        "'context_management.edits[0].keep'",
    ),
]
TAKEN: list[dict[str, Any]] = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [USER, ASKING, {"role": "user", "content": [RESULT]}]},
    {"messages": [USER, {"role": "assistant", "content": "I think"}]},
    {"messages": [USER, {"role": "system", "content": "Now."}, USER]},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"thinking": {"type": "adaptive", "display": "omitted"}},
    {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
    {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"tools": [], "metadata": {"user_id": None}, "service_tier": "auto", "top_k": 5},
    {"context_management": {"edits": []}},
    {"tools": [{**TOOL, "name": "n" * 128}]},
    {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"stop_sequences": ["x"] * 16, "cache_control": {"type": "ephemeral"}},
]


def good(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 99, "messages": [USER], **fields}


@pytest.mark.parametrize(("fields", "told"), REFUSED, ids=lambda value: str(value)[:60])
async def test_what_is_wrong_is_refused_in_this_protocols_shape(
    lone: httpx.AsyncClient, fields: dict[str, Any], told: str
) -> None:
    response = await lone.post("/v1/messages", json=good(**fields))
    shown = response.json()
    assert response.status_code == 400
    assert (shown["type"], shown["error"]["type"]) == ("error", "invalid_request_error")
    assert told in shown["error"]["message"]
    assert shown["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("fields", TAKEN, ids=lambda value: str(value)[:60])
async def test_what_is_right_reaches_the_detokenizer(
    lone: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    response = await lone.post("/v1/messages", json=good(**fields))
    assert response.status_code == ACCEPTED, response.text
    assert response.json()["error"]["type"] == "overloaded_error"


async def test_the_prompt_is_that_of_the_same_chat(mesh: Mesh) -> None:
    turns = [USER, ASKING, {"role": "user", "content": [RESULT]}]
    body = good(messages=turns, system="Be brief.", tools=[TOOL])
    await mesh.http.post("/v1/messages", json=body)
    call = {"id": "t1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    function = {"name": "now", "description": "time", "parameters": {"type": "object"}}
    await mesh.chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "12"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    one, other = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert one == other
    counted = await mesh.http.post(
        "/v1/messages/count_tokens",
        json={name: body[name] for name in ("model", "messages", "system", "tools")},
    )
    assert counted.json() == {"input_tokens": len(one) // 4}


async def test_the_submission_says_what_the_body_said(mesh: Mesh) -> None:
    body = good(
        stream=True, temperature=0.5, top_p=0.5, top_k=3, stop_sequences=["x", "y"], tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 7, "display": "omitted"}, seed=5,
    )  # fmt: skip
    await mesh.http.post("/v1/messages", json=body)
    submit = mesh.fake.submits[0].submit
    s, o = submit.sampling, submit.output
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.seed) == (99, 0.5, 0.5, 3, 5)
    assert s.thinking_budget.max_tokens == 7
    assert (o.object_kind, o.is_stream) == (detokenizer_pb2.OBJECT_KIND_MESSAGE, True)
    assert (list(o.stop), o.parallel_tool_calls, o.include_reasoning) == (["x", "y"], False, False)
    assert o.response_id.startswith("msg_")


async def test_an_answer_that_was_begun_is_gone_on_with(mesh: Mesh) -> None:
    turns = [USER, {"role": "assistant", "content": "Once upon"}]
    await mesh.http.post("/v1/messages", json=good(messages=turns))
    ids = mesh.fake.submits[0].submit.sequences[0].prompt_token_ids
    text = mesh.gateway.dialect.decode(memoryview(ids).cast("I").tolist())
    assert text.endswith("Once upon")


async def test_thinking_is_switched_off_when_that_is_asked_for(mesh: Mesh) -> None:
    await mesh.http.post("/v1/messages", json=good(thinking={"type": "disabled"}))
    assert not mesh.fake.submits[0].submit.output.starts_in_reasoning


async def test_unknown_fields_are_served_and_named_hints_are_neither(mesh: Mesh) -> None:
    hinted = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "odd": 1}
    response = await mesh.http.post(
        "/v1/messages", json=good(foo=1, messages=[{"role": "user", "content": [hinted]}])
    )
    assert response.status_code == 200
    assert response.headers["x-unknown-fields"] == "foo, messages[0].content[0].odd"


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
async def test_all_earlier_thinking_is_seen_again_when_that_is_asked_for(
    mesh: Mesh, keep: Any
) -> None:
    thought = {"type": "thinking", "thinking": "deep thought", "signature": "s"}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "Yes."}]}
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    for fields in ({}, {"context_management": {"edits": [edit]}}):
        await mesh.http.post("/v1/messages", json=good(messages=[USER, said, USER], **fields))
    texts = [
        mesh.gateway.dialect.decode(
            memoryview(s.submit.sequences[0].prompt_token_ids).cast("I").tolist()
        )
        for s in mesh.fake.submits
    ]
    assert ["deep thought" in text for text in texts] == [False, True]


LATE = {**RESULT, "tool_use_id": "t9"}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": [USER, ASKING]}, "with 'tool_use' blocks"),
        ({"messages": [USER, ASKING, USER]}, "a 'tool_result' for each 'tool_use_id'"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "a 'tool_result' block must"),
        (
            {"messages": [USER, ASKING, {"role": "user", "content": [LATE]}]},
            "'messages[2].content[0].tool_use_id': 't9' is not among the 'tool_use' blocks",
        ),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "'output_config.format.schema'",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
            "'output_config.format.schema'",
        ),
    ],
)
async def test_errors_speak_the_language_of_the_protocol(
    lone: httpx.AsyncClient, fields: dict[str, Any], told: str
) -> None:
    response = await lone.post("/v1/messages", json=good(**fields))
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert told in message
    words = ("tool_call", "tool message", "role 'tool'", "json_schema.")
    assert not [word for word in words if word in message], message


async def test_a_long_name_of_a_tool_goes_all_the_way(mesh: Mesh) -> None:
    name = "n" * 128
    body = good(tools=[{**TOOL, "name": name}], tool_choice={"type": "tool", "name": name})
    response = await mesh.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    submit = mesh.fake.submits[0].submit
    assert submit.output.tool_choice_name == name
    counted = {k: v for k, v in body.items() if k != "max_tokens"}
    response = await mesh.http.post("/v1/messages/count_tokens", json=counted)
    assert response.status_code == 200, response.text
