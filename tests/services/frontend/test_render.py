"""Where prompts are rendered and what is refused before."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from services.frontend.errors import ApiError
from services.frontend.render import INLINE_BYTES, Conversation, Renderer
from shared.errors import FailureReason, RequestError
from shared.glm.dialect import Dialect

LONG = INLINE_BYTES + 1


@pytest.fixture
def renderer(dialect: Dialect) -> Iterator[Renderer]:
    renderer = Renderer(dialect, num_threads=1, max_waiting=1)
    yield renderer
    renderer.close()


def chat(content: Any = "Hi", role: str = "user") -> Conversation:
    return Conversation(
        messages=[{"role": role, "content": content}], tools=None, template_kwargs={}
    )


async def test_a_short_prompt_is_rendered_on_the_loop(renderer: Renderer) -> None:
    threads = threading.active_count()
    prompt = await renderer.render_chat(chat(), num_bytes=10, limit=100)
    assert prompt.text.endswith("<|user|>Hi<|assistant|><think>")
    assert prompt.starts_in_reasoning
    # Threads of earlier tests may end meanwhile.
    assert threading.active_count() <= threads


async def test_a_long_prompt_leaves_the_loop_free(renderer: Renderer) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counter = asyncio.create_task(count())
    text = "some words " * 100_000
    await renderer.encode(text, allow_control=True, limit=1 << 40, param="prompt")
    counter.cancel()
    assert turns > 5


async def test_past_the_waiting_line_long_prompts_are_refused(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(
        renderer.dialect, "encode", lambda text, *, allow_control: gate.wait() and [1]
    )

    def encode() -> "asyncio.Task[list[int]]":
        text = "x" * LONG
        return asyncio.create_task(
            renderer.encode(text, allow_control=True, limit=LONG, param="prompt")
        )

    running, waiting = encode(), encode()
    await asyncio.sleep(0)
    with pytest.raises(RequestError) as caught:
        await encode()
    assert caught.value.reason is FailureReason.QUEUE_FULL
    gate.set()
    assert await running == await waiting == [1]
    assert await encode() == [1]


@pytest.mark.parametrize("role", ["system", "user", "tool", "developer"])
@pytest.mark.parametrize("in_parts", [False, True])
async def test_text_that_cannot_fit_is_refused_without_work(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, role: str, in_parts: bool
) -> None:
    monkeypatch.setattr(renderer.dialect, "render_chat", None)
    text = "x" * 1_000_000
    content = [{"type": "text", "text": text}] if in_parts else text
    with pytest.raises(ApiError) as caught:
        await renderer.render_chat(chat(content, role), num_bytes=len(text), limit=100)
    assert caught.value.code == "context_length_exceeded"
    assert "at least" in caught.value.message


async def test_text_that_the_template_may_drop_is_not_counted_before(renderer: Renderer) -> None:
    text = f"<think>{'x' * 50_000}</think>ok"
    conversation = Conversation(
        messages=[{"role": "assistant", "content": text}, {"role": "user", "content": "Hi"}],
        tools=None,
        template_kwargs={},
    )
    prompt = await renderer.render_chat(conversation, num_bytes=len(text), limit=100)
    assert len(prompt.token_ids) < 100


async def test_encoding_and_decoding_agree(renderer: Renderer) -> None:
    ids = await renderer.encode("Grüße 汉字", allow_control=False, limit=99, param="prompt")
    assert await renderer.decode(ids) == "Grüße 汉字"


@pytest.mark.parametrize("ids", [[-1], [0, 882], [10**30], [3, -5, 2]])
def test_ids_outside_the_vocabulary_are_refused_by_number(
    renderer: Renderer, ids: list[int]
) -> None:
    wrong = next(i for i in ids if not 0 <= i < 882)
    with pytest.raises(ApiError, match=f"token id {wrong}") as caught:
        renderer.check_ids(ids, "prompt")
    assert caught.value.param == "prompt"


def test_all_ids_of_the_tokenizer_are_taken(renderer: Renderer) -> None:
    renderer.check_ids([], "prompt")
    renderer.check_ids([0, renderer.dialect.vocab_size - 1], "prompt")
