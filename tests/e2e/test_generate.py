"""Token in, token out over HTTP: the same tokens as the chat, and the same text."""

from typing import Any

import httpx

from tests.e2e.mesh import Mesh

CHAT: Any = {
    "model": "glm-nano",
    "messages": [{"role": "user", "content": "What is 2 plus 3?"}],
    "temperature": 0,
    "max_tokens": 40,
}


def test_a_rendered_chat_gives_the_tokens_of_the_chat(nano: Mesh) -> None:
    with httpx.Client(base_url=nano.url, timeout=60) as http:
        chat = http.post("/v1/chat/completions", json={**CHAT, "return_token_ids": True}).json()
        rendered = http.post("/v1/chat/completions/render", json=CHAT).json()
        assert rendered["token_ids"] == chat["prompt_token_ids"]
        whole = http.post("/inference/v1/generate", json={**rendered, "output_mode": "text"})
        choice = whole.json()["choices"][0]
        assert choice["token_ids"] == chat["choices"][0]["token_ids"]
        assert choice["finish_reason"] == chat["choices"][0]["finish_reason"]
        streamed = http.post("/inference/v1/generate", json={**rendered, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")


def test_what_is_not_allowed_does_not_come(nano: Mesh) -> None:
    with httpx.Client(base_url=nano.url, timeout=60) as http:
        rendered = http.post("/v1/chat/completions/render", json=CHAT).json()
        rendered["sampling_params"]["allowed_token_ids"] = [40, 41, 42]
        answer = http.post("/inference/v1/generate", json=rendered).json()
        ids = answer["choices"][0]["token_ids"]
        assert len(ids) == 40
        assert set(ids) <= {40, 41, 42}


def test_a_bad_word_does_not_come(nano: Mesh) -> None:
    client = nano.client()
    plain = client.chat.completions.create(**CHAT).choices[0].message.content or ""
    word = plain.split()[0]
    other = client.chat.completions.create(**CHAT, extra_body={"bad_words": [word]})
    message = other.choices[0].message
    said = (message.content or "") + str(getattr(message, "reasoning", "") or "")
    assert word not in said.split()
