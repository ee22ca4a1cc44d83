"""Whatever comes in, the answer is a clear 4xx and the next request is served."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.mesh import Mesh, replay

USER = [{"role": "user", "content": "hi"}]
GOOD = {"model": "glm-nano", "messages": USER, **replay("fine")}
TEXT = {"model": "glm-nano", **replay("fine")}
LOW, HIGH = -(10**30), 10**30

# name, path, body, status, what the message or `param` must name
CASES: list[tuple[str, str, Any, int, str]] = [
    ("malformed JSON", "chat/completions", b'{"model": "glm-nano", ', 400, "JSON"),
    ("no JSON at all", "chat/completions", b"\x00\x01", 400, "JSON"),
    ("broken UTF-8", "chat/completions", b'{"model": "\xff\xfe"}', 400, "UTF-8"),
    ("a list", "chat/completions", [], 400, ""),
    ("empty body", "chat/completions", b"", 400, ""),
    ("no messages", "chat/completions", {"model": "glm-nano"}, 400, "messages"),
    ("empty messages", "chat/completions", {**GOOD, "messages": []}, 400, "messages"),
    ("wrong type", "chat/completions", {**GOOD, "messages": "hi"}, 400, "messages"),
    (
        "unknown role",
        "chat/completions",
        {**GOOD, "messages": [{"role": "alien", "content": "hi"}]},
        400,
        "messages",
    ),
    (
        "image part",
        "chat/completions",
        {
            **GOOD,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ],
        },
        400,
        "messages",
    ),
    ("unknown model", "chat/completions", {**GOOD, "model": "gpt-9"}, 404, "model"),
    ("hot", "chat/completions", {**GOOD, "temperature": HIGH}, 400, "temperature"),
    ("cold", "chat/completions", {**GOOD, "temperature": -1}, 400, "temperature"),
    ("words for a number", "chat/completions", {**GOOD, "top_p": "much"}, 400, "top_p"),
    ("top_p", "chat/completions", {**GOOD, "top_p": 2}, 400, "top_p"),
    ("top_k", "chat/completions", {**GOOD, "top_k": LOW}, 400, "top_k"),
    ("no tokens", "chat/completions", {**GOOD, "max_tokens": 0}, 400, "max_tokens"),
    ("endless", "chat/completions", {**GOOD, "max_tokens": 10**9}, 400, "1000000000"),
    ("fraction", "chat/completions", {**GOOD, "max_tokens": 1.5}, 400, "max_tokens"),
    ("n", "chat/completions", {**GOOD, "n": 10**6}, 400, "n"),
    ("stops", "chat/completions", {**GOOD, "stop": ["x"] * 1000}, 400, "stop"),
    ("logprobs", "chat/completions", {**GOOD, "top_logprobs": 999}, 400, "logprobs"),
    ("tools", "chat/completions", {**GOOD, "tools": [{"type": "rocket"}]}, 400, "tools"),
    ("bias", "chat/completions", {**GOOD, "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    ("unknown ids", "completions", {**TEXT, "prompt": [10**7]}, 400, "prompt"),
    ("negative ids", "completions", {**TEXT, "prompt": [-1]}, 400, "prompt"),
    ("no prompt", "completions", {**TEXT, "prompt": []}, 400, "prompt"),
    ("stop ids", "chat/completions", {**GOOD, "stop_token_ids": [10**7]}, 400, "stop_token_ids"),
    (
        "prompt too long",
        "chat/completions",
        {**GOOD, "messages": [{"role": "user", "content": "word " * 20_000}]},
        400,
        "context length",
    ),
    ("5 MB of text", "completions", {**TEXT, "prompt": "a b " * 1_250_000}, 400, ""),
    ("deep nesting", "chat/completions", b'{"model":' + b"[" * 50_000, 400, ""),
    ("replay of nothing", "chat/completions", {**GOOD, "replay": {}}, 400, "replay"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "named"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_a_bad_request_is_refused_by_name_and_the_next_is_served(
    replayed: Mesh, path: str, body: Any, status: int, named: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=f"{replayed.url}/v1/", timeout=30) as client:
        answer = client.post(path, content=content, headers=headers)
        assert answer.status_code == status, answer.text[:500]
        error = answer.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert named in f"{error['message']} {error['param']}"
        assert "Traceback" not in answer.text
        assert client.post("chat/completions", json=GOOD).json()["choices"][0]["message"]


def test_unknown_paths_and_methods_have_the_same_envelope(replayed: Mesh) -> None:
    with httpx.Client(base_url=replayed.url, timeout=30) as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("GET", "/v1/models/other", 404),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]


def test_replay_is_refused_where_a_model_runs(nano: Mesh) -> None:
    answer = httpx.post(f"{nano.url}/v1/chat/completions", json=GOOD, timeout=30)
    assert answer.status_code == 400
    assert "replay" in answer.json()["error"]["message"]


def test_half_a_request_does_no_harm(replayed: Mesh) -> None:
    parts = urlsplit(replayed.url)
    for data in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((str(parts.hostname), int(parts.port or 0))) as raw:
            raw.sendall(data)
    answer = httpx.post(f"{replayed.url}/v1/chat/completions", json=GOOD, timeout=30)
    assert answer.status_code == 200
    replayed.until_idle()
