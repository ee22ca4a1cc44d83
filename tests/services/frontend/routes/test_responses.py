"""POST /v1/responses and what is kept of it, with the SDK where it has a word for it."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.frontend.response_store import ResponseTable, StoreBounds, StoredResponse
from tests.services.frontend.conftest import NAME, Mesh
from tests.services.frontend.fake_detokenizer import TEXT, Behaviour
from tests.services.frontend.waits import until


async def test_the_sdk_creates_retrieves_and_deletes(mesh: Mesh) -> None:
    client = mesh.openai
    made = await client.responses.create(model=NAME, input="Hi", metadata={"a": "b"})
    assert made.output_text == TEXT
    assert made.metadata == {"a": "b"}
    found = await client.responses.retrieve(made.id)
    assert found.output_text == TEXT
    items = await client.responses.input_items.list(made.id)
    assert [item.type for item in items.data] == ["message"]
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.retrieve(made.id)
    assert (caught.value.param, caught.value.code) == ("response_id", "response_not_found")


async def test_a_streamed_response_is_kept_as_well(mesh: Mesh) -> None:
    stream = await mesh.openai.responses.create(model=NAME, input="Hi", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    kept = await mesh.openai.responses.retrieve(events[-1].response.id)
    assert kept.output_text == TEXT


async def test_what_is_not_to_be_stored_is_not(mesh: Mesh) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi", store=False)
    response = await mesh.http.get(f"/v1/responses/{made.id}")
    assert response.status_code == 404


async def test_a_conversation_goes_on_from_a_stored_response(mesh: Mesh) -> None:
    client = mesh.openai
    first = await client.responses.create(model=NAME, input="One")
    second = await client.responses.create(model=NAME, input="Two", previous_response_id=first.id)
    await client.responses.create(model=NAME, input="Three", previous_response_id=second.id)
    await mesh.chat(
        messages=[
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "Three"},
        ]
    )
    *_, third, chat = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert third == chat


OUTPUT_ITEMS = (
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
)


async def test_text_behind_a_call_is_taken_back_stored_or_in_full(mesh: Mesh) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    shown = made.model_dump(mode="json")
    output = {"type": "function_call_output", "call_id": "c1", "output": "12"}
    user = {"role": "user", "content": "Hi"}
    stored = StoredResponse(
        object_json=json.dumps({**shown, "output": OUTPUT_ITEMS}).encode(),
        input_json=json.dumps([user]).encode(),
    )
    await mesh.gateway.responses.put("resp_calls", "", stored)
    whole = {"input": [user, *OUTPUT_ITEMS, output]}
    later = {"input": [output], "previous_response_id": "resp_calls"}
    for body in (whole, later):
        response = await mesh.http.post("/v1/responses", json={"model": NAME, **body})
        assert response.status_code == 200, response.text
    *_, first, second = (s.submit.sequences[0].prompt_token_ids for s in mesh.fake.submits)
    assert first == second


async def test_a_response_nobody_kept_cannot_be_gone_on_from(mesh: Mesh) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await mesh.openai.responses.create(model=NAME, input="x", previous_response_id="resp_0")
    assert caught.value.param == "previous_response_id"


async def test_a_failed_stream_ends_with_a_numbered_error_event(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(failure_after=2)
    response = await mesh.http.post(
        "/v1/responses", json={"model": NAME, "input": "Hi", "stream": True}
    )
    last = response.text.strip().split("\n\n")[-1]
    name, data = last.split("\n")
    document = json.loads(data.removeprefix("data: "))
    assert (name, document["type"], document["sequence_number"]) == ("event: error", "error", 2)
    assert document["code"] == "service_unavailable"
    assert "[DONE]" not in response.text


async def test_a_background_response_is_there_later(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(pause_s=0.05)
    client = mesh.openai
    made = await client.responses.create(model=NAME, input="Hi", background=True)
    assert (made.status, made.output) == ("in_progress", [])
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(made.id)).status == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert found.output_text == TEXT
    await wait_until_idle(mesh)
    cancelled = await client.responses.cancel(made.id)
    assert cancelled.status == "completed", "too late to cancel"


async def test_a_background_response_can_be_cancelled(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    client = mesh.openai
    made = await client.responses.create(model=NAME, input="Hi", background=True)
    assert (await client.responses.cancel(made.id)).status == "cancelled"
    assert mesh.fake.aborted_request_ids == [made.id]
    assert (await client.responses.retrieve(made.id)).status == "cancelled"


async def wait_until_idle(mesh: Mesh) -> None:
    await until(lambda: not mesh.gateway.admission.num_running)


def ending(end: str, may_go_on: asyncio.Event) -> Behaviour:
    """An answer that ends in that way once it may."""
    return Behaviour(
        failure_after=0 if end == "failed" else None,
        silent_after=0 if end == "never" else None,
        may_go_on=may_go_on,
    )


@pytest.mark.parametrize("end", ["finished", "failed", "never"])
async def test_what_was_cancelled_stays_so_though_the_mesh_goes_on(mesh: Mesh, end: str) -> None:
    may_go_on = asyncio.Event()
    mesh.fake.behaviour = ending(end, may_go_on)
    made = await mesh.openai.responses.create(model=NAME, input="Hi", background=True)
    assert (await mesh.openai.responses.cancel(made.id)).status == "cancelled"
    may_go_on.set()
    await wait_until_idle(mesh)
    assert (await mesh.openai.responses.retrieve(made.id)).status == "cancelled"
    assert (await mesh.openai.responses.cancel(made.id)).status == "cancelled"


async def test_a_response_is_cancelled_while_the_mesh_is_away(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    made = await mesh.openai.responses.create(model=NAME, input="Hi", background=True)
    await mesh.fake.stop()
    assert (await mesh.openai.responses.cancel(made.id)).status == "cancelled"
    await wait_until_idle(mesh)
    assert (await mesh.openai.responses.retrieve(made.id)).status == "cancelled"
    await mesh.fake.start()


class TestSmallStore:
    """A store that takes what is not there yet, and no finished response."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"max_stored_response_bytes": 1024}

    async def test_a_background_response_that_is_too_large_in_the_end_has_failed(
        self, mesh: Mesh
    ) -> None:
        mesh.fake.behaviour = Behaviour(pause_s=0.05)
        made = await mesh.openai.responses.create(
            model=NAME, input="Hi", instructions="x" * 190, background=True
        )
        await wait_until_idle(mesh)
        found = await mesh.openai.responses.retrieve(made.id)
        assert found.status == "failed"
        assert found.error is not None
        assert "too large" in found.error.message

    async def test_one_that_is_too_large_from_the_start_is_refused(self, mesh: Mesh) -> None:
        with pytest.raises(openai.InternalServerError, match="cannot be kept") as caught:
            await mesh.openai.responses.create(
                model=NAME, input="Hi", instructions="x" * 1024, background=True
            )
        assert caught.value.status_code == 503
        await wait_until_idle(mesh)


class TestSeveralProcesses:
    """A store that another process of the gateway has open as well."""

    @pytest.fixture
    def extra_settings(self, run_dir: Path) -> dict[str, Any]:
        return {"response_store_path": run_dir / "responses.db"}

    @pytest.fixture
    def other(self, mesh: Mesh, run_dir: Path) -> Iterator[ResponseTable]:
        bounds = StoreBounds(max_responses=9, max_bytes=10_000, ttl_s=100)
        table = ResponseTable(run_dir / "responses.db", bounds)
        yield table
        table.close()

    @pytest.mark.parametrize("how", ["cancel", "delete"])
    async def test_what_another_ends_is_not_worked_on(
        self, mesh: Mesh, other: ResponseTable, how: str
    ) -> None:
        mesh.fake.behaviour = Behaviour(silent_after=0)
        made = await mesh.openai.responses.create(model=NAME, input="Hi", background=True)
        assert mesh.gateway.admission.num_running == 1
        getattr(other, how)(made.id, "", time.time())
        await wait_until_idle(mesh)
        assert mesh.fake.aborted_request_ids == [], "nobody asked the mesh"
        await mesh.fake.wait_until(lambda: mesh.fake.aborted)
        found = await mesh.http.get(f"/v1/responses/{made.id}")
        assert (
            found.status_code == 404 if how == "delete" else found.json()["status"] == "cancelled"
        )

    async def test_what_a_lost_process_worked_on_reads_as_failed(
        self, mesh: Mesh, other: ResponseTable
    ) -> None:
        made = await mesh.openai.responses.create(model=NAME, input="Hi")
        shown = made.model_dump(mode="json") | {"status": "in_progress", "background": True}
        pending = StoredResponse(
            object_json=json.dumps(shown).encode(), input_json=b"[]", is_open=True
        )
        other.put("resp_lost", "", pending, time.time())
        assert (await mesh.openai.responses.retrieve("resp_lost")).status == "in_progress"
        other.close()
        found = await mesh.openai.responses.retrieve("resp_lost")
        assert found.status == "failed"
        assert found.error is not None
        assert "process that worked on the response was lost" in found.error.message
        with pytest.raises(openai.BadRequestError, match="the response is failed"):
            await mesh.openai.responses.create(
                model=NAME, input="Hi", previous_response_id="resp_lost"
            )


@pytest.mark.parametrize("end", ["finished", "failed", "never"])
async def test_a_deleted_background_response_is_ended_and_stays_gone(mesh: Mesh, end: str) -> None:
    may_go_on = asyncio.Event()
    mesh.fake.behaviour = ending(end, may_go_on)
    path, body = "/v1/responses", {"model": NAME, "input": "Hi", "background": True}
    made = (await mesh.http.post(path, json=body)).json()
    deleted = await mesh.http.delete(f"{path}/{made['id']}")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert mesh.fake.aborted_request_ids == [made["id"]]
    may_go_on.set()
    await wait_until_idle(mesh)
    assert (await mesh.http.get(f"{path}/{made['id']}")).status_code == 404
    assert (await mesh.http.delete(f"{path}/{made['id']}")).status_code == 404


async def test_what_is_deleted_while_the_mesh_is_away_is_gone_as_well(mesh: Mesh) -> None:
    mesh.fake.behaviour = Behaviour(silent_after=0)
    made = await mesh.openai.responses.create(model=NAME, input="Hi", background=True)
    await mesh.fake.stop()
    await mesh.openai.responses.delete(made.id)
    assert (await mesh.http.get(f"/v1/responses/{made.id}")).status_code == 404
    await mesh.fake.start()


async def test_a_finished_response_is_deleted_without_a_word_to_the_mesh(mesh: Mesh) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    await mesh.openai.responses.delete(made.id)
    assert mesh.fake.aborted_request_ids == []


async def test_a_response_that_was_waited_for_cannot_be_cancelled(mesh: Mesh) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    with pytest.raises(openai.BadRequestError, match="synchronous"):
        await mesh.openai.responses.cancel(made.id)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=in_9", "after")],
)
async def test_a_page_that_cannot_be_is_refused(mesh: Mesh, query: str, param: str) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    response = await mesh.http.get(f"/v1/responses/{made.id}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_items_come_page_by_page_in_either_order(mesh: Mesh) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(3)]
    made = await mesh.openai.responses.create(model=NAME, input=items)
    path = f"/v1/responses/{made.id}/input_items"
    first = (await mesh.http.get(f"{path}?limit=2&order=asc")).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["0", "1"]
    assert first["has_more"]
    rest = (await mesh.http.get(f"{path}?order=asc&after={first['last_id']}")).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2"]
    assert not rest["has_more"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("?stream=1", "stream"),
        ("?stream=true&starting_after=3", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?starting_after=0", "starting_after"),
        ("?include_obfuscation=true", "include_obfuscation"),
        ("?include=reasoning.encrypted_content", "include"),
        ("?include[]=reasoning.encrypted_content", "include"),
        ("/input_items?include=message.output_text.logprobs", "include"),
        ("/input_items?include[0]=x", "include"),
    ],
)
async def test_options_of_a_kept_response_that_are_not_served_are_named(
    mesh: Mesh, path: str, param: str
) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    response = await mesh.http.get(f"/v1/responses/{made.id}{path}")
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["code"] == "unsupported_value"


async def test_options_that_say_no_ask_for_nothing(mesh: Mesh) -> None:
    made = await mesh.openai.responses.create(model=NAME, input="Hi")
    path = f"/v1/responses/{made.id}?stream=false&include_obfuscation=false&include="
    assert (await mesh.http.get(path)).status_code == 200


class TestTenants:
    """With keys, a response belongs to the key that made it."""

    @pytest.fixture
    def extra_settings(self) -> dict[str, Any]:
        return {"api_key": ["ann", "bob"]}

    async def test_another_key_does_not_see_it(self, mesh: Mesh) -> None:
        def headers(key: str) -> dict[str, str]:
            return {"authorization": f"Bearer {key}"}

        made: httpx.Response = await mesh.http.post(
            "/v1/responses", json={"model": NAME, "input": "Hi"}, headers=headers("ann")
        )
        path = f"/v1/responses/{made.json()['id']}"
        assert (await mesh.http.get(path, headers=headers("ann"))).status_code == 200
        assert (await mesh.http.get(path, headers=headers("bob"))).status_code == 404
