"""One request is one connected tree of spans over the four services."""

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay
from tests.shared.otlp_receiver import Received, Receiver, otlp_receiver

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = {"render", "tokenize", "queue", "prefill", "decode", "detokenize"}
SERVICES = {f"glm-mesh-{name}" for name in ("frontend", "detokenizer", "scheduler", "worker")}


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[Mesh, Receiver]]:
    with otlp_receiver() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        mesh = Mesh("--worker", "replay", environment=environment)
        try:
            yield mesh, receiver
        finally:
            mesh.stop()
            mesh.remove()


def ask(mesh: Mesh, traceparent: str = "", *, stream: bool = False) -> None:
    answer = httpx.post(
        f"{mesh.url}/v1/chat/completions",
        json={
            "model": "glm-nano",
            "messages": [{"role": "user", "content": "x"}],
            "stream": stream,
            **replay("think</think>a few words"),
        },
        headers={"traceparent": traceparent} if traceparent else {},
        timeout=30,
    )
    assert answer.status_code == 200


def trees(receiver: Receiver) -> dict[str, list[Received]]:
    """Spans by trace, without those that only say that a service started."""
    found: dict[str, list[Received]] = {}
    for span in receiver.spans():
        if span.name != "start":
            found.setdefault(span.trace_id, []).append(span)
    return found


def is_whole(spans: list[Received], parent_of_root: str = "") -> bool:
    """Whether a tree has arrived from its root to its leaves: services send theirs in batches."""
    parents = {span.parent_id for span in spans} - {span.span_id for span in spans}
    is_of_all = {span.service for span in spans} == SERVICES
    return is_of_all and {span.name for span in spans} >= PHASES and parents == {parent_of_root}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_tree_over_all_services(
    traced: tuple[Mesh, Receiver], stream: bool
) -> None:
    mesh, receiver = traced
    before = set(trees(receiver))
    ask(mesh, stream=stream)

    def complete() -> bool:
        fresh = [spans for trace, spans in trees(receiver).items() if trace not in before]
        return bool(fresh) and is_whole(fresh[0])

    mesh.until(complete, 30, "all four services have sent their spans")
    fresh = [spans for trace, spans in trees(receiver).items() if trace not in before]
    assert len(fresh) == 1, "one request made several traces"
    spans = fresh[0]
    ids = {span.span_id for span in spans}
    roots = [span for span in spans if not span.parent_id]
    assert len(roots) == 1
    assert roots[0].service == "glm-mesh-frontend"
    assert all(span.parent_id in ids for span in spans if span.parent_id), spans
    assert {span.name for span in spans} >= PHASES
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.start_ns <= span.end_ns
        if span.parent_id:
            assert span.start_ns >= by_id[span.parent_id].start_ns - 5_000_000, span


def test_the_callers_context_is_the_root(traced: tuple[Mesh, Receiver]) -> None:
    mesh, receiver = traced
    ask(mesh, f"00-{TRACE_ID}-{SPAN_ID}-01")

    mesh.until(
        lambda: is_whole(trees(receiver).get(TRACE_ID, []), SPAN_ID),
        30,
        "the whole tree hangs below the caller's span",
    )


def test_an_unsampled_request_leaves_no_span(traced: tuple[Mesh, Receiver]) -> None:
    mesh, receiver = traced
    unsampled = TRACE_ID.replace("0af7", "1af7")
    ask(mesh, f"00-{unsampled}-{SPAN_ID}-00")
    marker = TRACE_ID.replace("0af7", "2af7")
    ask(mesh, f"00-{marker}-{SPAN_ID}-01")
    mesh.until(lambda: is_whole(trees(receiver).get(marker, []), SPAN_ID), 30, "spans")
    assert unsampled not in trees(receiver)
