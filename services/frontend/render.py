"""Prompts: chat messages and texts to token ids, by the checkpoint's dialect.

Short prompts are rendered on the event loop, since handing them over costs more than the work.
Long ones go to a small pool of threads with a bounded line, so that one of them delays nobody. A
text whose bytes cannot fit into the context is refused before any work is spent on it.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from services.frontend.errors import context_exceeded, invalid
from services.frontend.validation import quote
from shared.errors import FailureReason, RequestError
from shared.glm.dialect import Dialect
from shared.glm.render import RenderedPrompt
from shared.tracing import start_span

T = TypeVar("T")

INLINE_BYTES: Final = 8192
# Where a text may be longer than the context; the body's own limit bounds it.
NO_LIMIT: Final = 1 << 62
_CLIENT_ROLES: Final = frozenset({"system", "developer", "user", "tool"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat prompt is made of; messages and tools as in an OpenAI request."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Renderer:
    """Renders and encodes; safe for many requests at once.

    Args:
        dialect: The checkpoint's template and tokenizer.
        num_threads: Threads for long prompts.
        max_waiting: Long prompts that may wait for a thread.
    """

    def __init__(self, dialect: Dialect, *, num_threads: int, max_waiting: int) -> None:
        """Start the pool; `close` ends it."""
        self.dialect = dialect
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="render")
        self._max_pending = num_threads + max_waiting
        self._num_pending = 0
        # An upper bound of bytes per token turns bytes into a lower bound of tokens.
        self._max_token_bytes = max(map(len, dialect.vocabulary.token_bytes))

    async def render_chat(
        self, conversation: Conversation, *, num_bytes: int, limit: int, traceparent: str = ""
    ) -> RenderedPrompt:
        """A conversation to its prompt.

        Args:
            conversation: What to render.
            num_bytes: Size of the request; decides where the work is done.
            limit: Most tokens of the context.
            traceparent: Context of the request's root span.
        """
        if num_bytes > limit:  # else nothing can be too long, every token has at least a byte
            texts = _client_texts(conversation.messages)
            self._refuse_hopeless(texts, limit, "messages")

        def work() -> RenderedPrompt:
            return self.dialect.render_chat(
                conversation.messages,
                conversation.tools,
                template_kwargs=conversation.template_kwargs,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
            )

        with start_span("render", traceparent=traceparent) as span:
            prompt = await self._do(work, num_bytes)
            span.end(prompt.encode_started_ns)
        tokenize = start_span(
            "tokenize", traceparent=traceparent, start_ns=prompt.encode_started_ns
        )
        tokenize.set("glm.num_prompt_tokens", len(prompt.token_ids))
        tokenize.end()
        return prompt

    async def encode(
        self, text: str, *, allow_control: bool, limit: int, param: str, traceparent: str = ""
    ) -> list[int]:
        """A text to its ids."""
        if len(text) > limit:
            self._refuse_hopeless([text], limit, param)
        with start_span("tokenize", traceparent=traceparent) as span:
            ids = await self._do(
                lambda: self.dialect.encode(text, allow_control=allow_control), len(text)
            )
            span.set("glm.num_prompt_tokens", len(ids))
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """Ids to their text, special tokens shown."""
        return await self._do(lambda: self.dialect.decode(ids), 4 * len(ids))

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model has no logits or embedding for; names the first one."""
        size = self.dialect.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):  # a loop would hold up everybody
            wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise invalid(
                f"Invalid '{param}': token id {quote(wrong)} is outside the vocabulary "
                f"(0 to {size - 1}).",
                param,
            )

    def close(self) -> None:
        """End the pool; work that has not started is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _refuse_hopeless(self, texts: Iterable[str], limit: int, param: str) -> None:
        num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
        at_least = -(-num_bytes // self._max_token_bytes)
        if at_least > limit:
            raise context_exceeded(limit, at_least, None, param, is_lower_bound=True)

    async def _do(self, work: Callable[[], T], num_bytes: int) -> T:
        if num_bytes <= INLINE_BYTES:
            return work()
        if self._num_pending >= self._max_pending:
            raise RequestError(
                FailureReason.QUEUE_FULL,
                "too many long prompts are being rendered",
                retry_after_ms=1000,
            )
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1


def _client_texts(messages: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Texts that the template shows whole, whatever else it leaves out."""
    for message in messages:
        if message.get("role") in _CLIENT_ROLES:
            content = message.get("content")
            if isinstance(content, str):
                yield content
            elif isinstance(content, list):
                yield from (part["text"] for part in content if isinstance(part.get("text"), str))
