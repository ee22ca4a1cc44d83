"""The door: ids, envelopes for everything, counters."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.frontend.auth import ApiKeys
from services.frontend.gateway import Gateway
from services.frontend.metrics import GatewayMetrics
from services.frontend.middleware import Door
from shared.sampling import LoadSnapshot
from tests.services.frontend.conftest import Mesh


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "unknown_url"),
        ("GET", "/v1/nope", 404, "unknown_url"),
        ("POST", "/v1/embeddings", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("BREW", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("GET", "/static-offline-docs/nope", 404, "unknown_url"),
    ],
)
async def test_what_the_framework_refuses_has_the_envelope(
    lone: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await lone.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert response.headers["x-request-id"]


async def test_a_wrong_method_names_the_right_ones(lone: httpx.AsyncClient) -> None:
    assert (await lone.get("/v1/completions")).headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("my-id", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a\tb", False)],
)
async def test_the_callers_request_id_is_echoed_if_it_is_sound(
    lone: httpx.AsyncClient, given: str, is_kept: bool
) -> None:
    response = await lone.get("/health", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is is_kept


async def test_the_bodys_request_id_is_echoed_unless_the_header_has_one(mesh: Mesh) -> None:
    assert (await mesh.chat(request_id="from-body")).headers["x-request-id"] == "from-body"
    response = await mesh.http.post(
        "/v1/completions",
        json={"prompt": "Hi", "request_id": "from-body"},
        headers={"x-request-id": "from-header"},
    )
    assert response.headers["x-request-id"] == "from-header"
    assert response.json()["id"].startswith("cmpl-")


async def test_equal_request_ids_do_not_make_equal_answers(mesh: Mesh) -> None:
    first, second = await mesh.chat(request_id="same"), await mesh.chat(request_id="same")
    assert first.json()["id"] != second.json()["id"]


class Recorder:
    """Stands for the exporter: keeps finished spans."""

    def __init__(self) -> None:
        self.ended: list[RecordedSpan] = []

    def start(
        self, name: str, traceparent: str, attributes: Any, start_ns: int | None
    ) -> "RecordedSpan":
        return RecordedSpan(self, name, traceparent, dict(attributes or {}))

    def current_traceparent(self) -> str:
        return ""

    def shutdown(self, limit_s: float) -> None:
        """Nothing to send."""


class RecordedSpan:
    """A span that notes what it is told."""

    def __init__(self, recorder: Recorder, name: str, parent: str, facts: dict[str, Any]) -> None:
        self.recorder, self.name, self.parent, self.facts = recorder, name, parent, facts
        self.traceparent = "child-of-" + (parent[:5] or "none")
        self.is_ended, self.has_failed = False, False

    def set(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def fail(self, reason: str) -> None:
        self.has_failed = True

    def end(self, end_ns: int | None = None) -> None:
        if not self.is_ended:
            self.is_ended = True
            self.recorder.ended.append(self)

    def __enter__(self) -> "RecordedSpan":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("shared.tracing._process.tracer", recorder)
    return recorder


async def test_a_request_is_one_trace_with_its_phases(mesh: Mesh, recorder: Recorder) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    response = await mesh.http.post(
        "/v1/chat/completions", json=body, headers={"traceparent": parent}
    )
    assert response.status_code == 200
    spans = {span.name: span for span in recorder.ended}
    assert list(spans) == ["render", "tokenize", "http"]
    root = spans["http"]
    assert root.parent == parent
    assert spans["render"].parent == spans["tokenize"].parent == root.traceparent
    assert mesh.fake.submits[0].submit.traceparent == root.traceparent
    assert root.facts["http.response.status_code"] == 200
    assert root.facts["gen_ai.response.id"] == mesh.fake.submits[0].submit.request_id
    assert root.facts["gen_ai.request.seed"] == str(mesh.fake.submits[0].submit.sampling.seed)
    assert root.facts["gen_ai.usage.output_tokens"] == 4
    assert not root.has_failed


async def test_the_log_has_the_seed_of_an_unseeded_request(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = (await mesh.chat()).json()
    record = next(r for r in caplog.records if getattr(r, "request_id", "") == answer["id"])
    assert vars(record)["seed"] == str(mesh.fake.submits[0].submit.sampling.seed)


async def test_a_refused_request_ends_its_trace_too(
    lone: httpx.AsyncClient, recorder: Recorder
) -> None:
    assert (await lone.post("/v1/completions", json={"prompt": "Hi"})).status_code == 503
    assert [span.name for span in recorder.ended] == ["tokenize", "http"]
    assert recorder.ended[-1].has_failed
    await lone.get("/health")
    assert len(recorder.ended) == 2


def door_before(app: Any) -> Door:
    return Door(app, keys=ApiKeys([]), metrics=GatewayMetrics("m", LoadSnapshot))


async def call(door: Door, sent: list[dict[str, Any]]) -> None:
    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "GET", "path": "/v1/x", "headers": []}
    await door(scope, receive, send)


async def test_an_exception_becomes_an_error_id_and_its_text_stays_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("secret text")

    sent: list[dict[str, Any]] = []
    await call(door_before(broken), sent)
    assert sent[0]["status"] == 500
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert "secret text" in caplog.text
    assert error["message"].split()[-1] in [getattr(r, "error_id", "") for r in caplog.records]


async def test_an_exception_after_the_head_sends_no_second_head() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError

    sent: list[dict[str, Any]] = []
    await call(door_before(broken), sent)
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_a_cancel_that_no_client_caused_is_passed_on() -> None:
    async def cancelled(scope: Scope, receive: Receive, send: Send) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await call(door_before(cancelled), [])


async def test_answers_are_counted_by_route_never_by_what_clients_invent(
    lone: httpx.AsyncClient, lone_gateway: Gateway
) -> None:
    await lone.get("/made-up-4711")
    await lone.request("BREW", "/made-up-4711")
    await lone.get("/v1/models/some-model")
    page = lone_gateway.metrics.render().decode()
    assert "4711" not in page
    assert "BREW" not in page
    assert "some-model" not in page
    assert 'handler="/v1/models/{model_id:path}"' in page
