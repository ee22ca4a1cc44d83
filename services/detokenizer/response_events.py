"""Events of a streamed response, in the order of the Responses API.

created, in_progress, then per item: output_item.added, [content_part.added, deltas, text done,
content_part.done | arguments deltas, arguments done], output_item.done; at last completed or
incomplete. Items follow each other; `sequence_number` counts from 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.messages import OutputSpec
from services.detokenizer.ordered import Kind, OrderedDelta, Run
from services.detokenizer.response_object import (
    Item,
    ItemWriter,
    ResponseHead,
    status_of,
    status_of_last,
)
from services.detokenizer.usage import Usage
from shared import sse

_DELTAS: Final = {
    Kind.REASONING: b"response.reasoning_text",
    Kind.CONTENT: b"response.output_text",
    Kind.CALL: b"response.function_call_arguments",
}


class ResponseStream:
    """Frames of one streamed response."""

    def __init__(
        self, spec: OutputSpec, logprobs: LogprobWriter, count: Callable[[], Usage]
    ) -> None:
        """Start a stream; `count` gives the usage so far."""
        self._writer = ItemWriter(spec, logprobs)
        self._head = ResponseHead(spec)
        self._count = count
        self._keeps = spec.keep_object
        self._number = 0
        self._frames: list[bytes] = []
        self._item: Item | None = None
        # Of all content so far; runs say which are theirs.
        self._logprobs: list[dict[str, Any]] = []
        self._call_index = -1
        self._output: list[dict[str, Any]] = []
        self._position = 0
        self._is_open = False
        self._is_done = False
        self._kept = b""

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Frames for everything new."""
        choice = choices[0]
        if self._is_done:
            return b""
        if not self._is_open:
            self._open()
        if choice.text.delta or choice.logprobs:
            self._add(choice)
        if choice.end is not None:
            self._finish(choice)
        frames, self._frames = self._frames, []
        return b"".join(frames)

    def kept(self) -> bytes:
        """The object of the last event, if it is to be kept."""
        return self._kept

    def _open(self) -> None:
        self._is_open = True
        shown = self._head.render("in_progress", [], None)
        for name in (b"response.created", b"response.in_progress"):
            self._event(name, b'"response":' + shown)

    def _add(self, choice: Choice) -> None:
        delta = choice.text.take()
        assert isinstance(delta, OrderedDelta)
        self._logprobs += self._writer.logprobs_of(choice.logprobs)
        choice.logprobs = []
        for run in delta.runs:
            if run.is_new or self._item is None:
                self._close("completed", choice)
                self._begin(run)
            assert self._item is not None
            known = self._logprobs
            self._extend(self._item, run.text, [known[i] for i in run.tokens] if known else [])

    def _begin(self, run: Run) -> None:
        self._item = item = self._writer.begin(run, self._position)
        self._call_index = run.index if run.kind is Kind.CALL else -1
        shown = b'"output_index":%d,"item":%b' % (self._position, encode(self._writer.empty(item)))
        self._event(b"response.output_item.added", shown)
        if item.kind is not Kind.CALL:
            empty = encode(self._writer.part(Item(item.kind, item.item_id)))
            self._event(b"response.content_part.added", self._place(item) + b',"part":' + empty)

    def _extend(self, item: Item, text: str, logprobs: list[dict[str, Any]]) -> None:
        item.pieces.append(text)
        item.logprobs += logprobs
        shown = self._place(item) + b',"delta":' + encode(text)
        if item.kind is Kind.CONTENT:
            shown += b',"logprobs":' + encode(logprobs)
        if text:
            self._event(_DELTAS[item.kind] + b".delta", shown)

    def _close(self, status: str, choice: Choice) -> None:
        """End the open item; a call that is not complete is no part of the object."""
        item, self._item = self._item, None
        if item is None:
            return
        is_cut = item.kind is Kind.CALL and self._call_index >= choice.text.num_calls
        whole = self._writer.whole(item, "incomplete" if is_cut else status)
        place, text = self._place(item), encode(item.text)
        if item.kind is Kind.CALL:
            name = b',"name":' + encode(item.name)
            self._event(_DELTAS[item.kind] + b".done", place + name + b',"arguments":' + text)
        else:
            extra = b""
            if item.kind is Kind.CONTENT:
                extra = b',"logprobs":' + encode(item.logprobs)
            self._event(_DELTAS[item.kind] + b".done", place + b',"text":' + text + extra)
            part = encode(self._writer.part(item))
            self._event(b"response.content_part.done", place + b',"part":' + part)
        shown = b'"output_index":%d,"item":%b' % (self._position, encode(whole))
        self._event(b"response.output_item.done", shown)
        self._position += 1
        if not is_cut:
            self._output.append(whole)

    def _finish(self, choice: Choice) -> None:
        self._is_done = True
        status = status_of(choice)
        if self._item is not None:
            self._close(status_of_last(self._item, choice), choice)
        shown = self._head.render(status, self._output, self._count())
        if self._keeps:
            self._kept = shown
        self._event(b"response." + status.encode(), b'"response":' + shown)

    def _place(self, item: Item) -> bytes:
        place = b'"item_id":%b,"output_index":%d' % (encode(item.item_id), self._position)
        return place if item.kind is Kind.CALL else place + b',"content_index":0'

    def _event(self, name: bytes, fields: bytes) -> None:
        document = b'{"type":"%b",%b,"sequence_number":%d}' % (name, fields, self._number)
        self._frames.append(sse.named_event(name, document))
        self._number += 1
