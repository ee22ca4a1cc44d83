"""Events of a streamed message, in the order of the Messages API.

message_start, ping, then per block: content_block_start, content_block_delta...,
content_block_stop; at last message_delta with the stop reason and the usage, message_stop.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice
from services.detokenizer.message_object import (
    ending_of,
    message_head,
    signature_of,
    usage_of,
)
from services.detokenizer.messages import OutputSpec
from services.detokenizer.ordered import Kind, OrderedDelta, Run
from services.detokenizer.usage import Usage
from shared import sse

# Name of a delta and of its text.
_DELTAS: Final = {
    Kind.REASONING: (b"thinking_delta", b"thinking"),
    Kind.CONTENT: (b"text_delta", b"text"),
    Kind.CALL: (b"input_json_delta", b"partial_json"),
}


class MessageStream:
    """Frames of one streamed message."""

    def __init__(self, spec: OutputSpec, count: Callable[[], Usage]) -> None:
        """Start a stream; `count` gives the usage so far."""
        self._spec = spec
        self._count = count
        self._index = -1
        self._kind: Kind | None = None
        self._thinking: list[str] = []
        self._is_open = False
        self._is_done = False

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Frames for everything new."""
        choice, frames = choices[0], list[bytes]()
        if self._is_done:
            return b""
        if not self._is_open:
            self._is_open = True
            frames += [self._start(), sse.PING]
        if choice.text.delta:
            delta = choice.text.take()
            assert isinstance(delta, OrderedDelta)
            for run in delta.runs:
                self._add(run, frames)
        if choice.end is not None:
            self._is_done = True
            self._close(frames)
            end = {"delta": ending_of(choice), "usage": usage_of(self._count())}
            frames.append(_event("message_delta", end))
            frames.append(_event("message_stop", {}))
        return b"".join(frames)

    def kept(self) -> bytes:
        """Messages are not kept."""
        return b""

    def _start(self) -> bytes:
        usage = usage_of(self._count().before_output())
        message = message_head(self._spec) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", {"message": message})

    def _add(self, run: Run, frames: list[bytes]) -> None:
        if run.is_new or self._kind is None:
            self._close(frames)
            self._kind = run.kind
            self._index += 1
            block = {"index": self._index, "content_block": _empty_block(run)}
            frames.append(_event("content_block_start", block))
        text = run.text
        if not text:
            return
        if run.kind is Kind.REASONING:
            self._thinking.append(text)
        name, field = _DELTAS[run.kind]
        document = b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}' % (
            self._index,
            name,
            field,
            encode(text),
        )
        frames.append(sse.named_event(b"content_block_delta", document))

    def _close(self, frames: list[bytes]) -> None:
        if self._kind is None:
            return
        if self._kind is Kind.REASONING:
            signature = signature_of("".join(self._thinking))
            delta = {"type": "signature_delta", "signature": signature}
            frames.append(_event("content_block_delta", {"index": self._index, "delta": delta}))
            self._thinking = []
        frames.append(_event("content_block_stop", {"index": self._index}))
        self._kind = None


def _empty_block(run: Run) -> dict[str, Any]:
    if run.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    if run.kind is Kind.CONTENT:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": run.call_id, "name": run.name, "input": {}}


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return sse.named_event(name.encode(), encode({"type": name, **fields}))
