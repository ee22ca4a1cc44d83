"""What chat and completion objects have in common: heads, JSON pieces, the order of a stream.

Chunks are put together from ready-made fragments; nothing is validated or copied field by field
for each token.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from services.detokenizer.choice import Choice
from services.detokenizer.messages import OutputSpec
from services.detokenizer.usage import Usage
from shared import sse

encode: Final[Callable[[object], bytes]] = msgspec.json.Encoder().encode


class Chunks(Protocol):
    """The chunks of one kind of object."""

    def opening(self, choice: Choice) -> bytes | None:
        """The `choices` entry that comes before all others of a choice."""

    def entries(self, choice: Choice) -> Sequence[bytes]:
        """The `choices` entries for what is new in a choice, each for a chunk of its own."""


class Presenter(Protocol):
    """Turns what is new in a response into bytes for the client."""

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Bytes for everything new; the last ones when every choice has ended."""

    def kept(self) -> bytes:
        """The finished object, where it was asked for beside a stream; else nothing."""


def head(spec: OutputSpec, object_name: str) -> bytes:
    """The beginning of every object of a response."""
    fields = {
        "id": spec.response_id,
        "object": object_name,
        "created": spec.created_s,
        "model": spec.model,
    }
    return encode(fields)[:-1]


def prompt_ids(choice: Choice) -> bytes:
    """The ids of a choice's prompt as JSON, the first time that they are asked for."""
    packed, choice.prompt_token_ids = choice.prompt_token_ids, b""
    return encode(array("I", packed).tolist()) if packed else b"null"


class StreamPresenter:
    """Server-sent events: openings, deltas, one final chunk per choice, usage, [DONE]."""

    def __init__(
        self,
        spec: OutputSpec,
        object_name: str,
        chunks: Chunks,
        count: Callable[[], Usage],
        *,
        fingerprint: str,
    ) -> None:
        """Start a stream; `count` gives the usage so far."""
        self._spec = spec
        self._chunks = chunks
        self._count = count
        # What every frame begins with; only what follows is looked through for each token.
        self._head = b"data: " + sse.one_line(head(spec, object_name)) + b',"choices":['
        self._fingerprint = b',"system_fingerprint":' + encode(fingerprint)
        self._is_open = False
        self._ended: set[int] = set()
        self._is_done = False

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Frames for everything new."""
        frames: list[bytes] = []
        for choice in choices:
            if choice.index in self._ended:
                continue
            entries = self._chunks.entries(choice)
            if not entries:
                continue
            if not self._is_open:
                self._open(choices, frames)
            tail = b""
            if choice.end is not None:
                self._ended.add(choice.index)
                tail = b"" if self._spec.include_usage else self._fingerprint
                frames += [self._frame(entry, b"", None) for entry in entries[:-1]]
            frames.append(self._frame(entries[-1], tail, None))
        if len(self._ended) == len(choices) and not self._is_done:
            self._is_done = True
            self._close(frames)
        return b"".join(frames)

    def kept(self) -> bytes:
        """Chunks are not kept as one object."""
        return b""

    def _open(self, choices: Sequence[Choice], frames: list[bytes]) -> None:
        self._is_open = True
        for choice in choices:
            opening = self._chunks.opening(choice)
            if opening is not None:
                # A chat has one prompt; it stands in the first chunk of each choice.
                tail = b""
                if choice.prompt_token_ids:
                    tail = b',"prompt_token_ids":' + prompt_ids(choice)
                frames.append(self._frame(opening, tail, self._count().before_output()))

    def _close(self, frames: list[bytes]) -> None:
        if self._spec.include_usage:
            usage = b'],"usage":' + self._count().to_json() + self._fingerprint + b"}"
            frames += (self._head, sse.one_line(usage), b"\n\n")
        frames.append(sse.DONE)

    def _frame(self, entry: bytes, tail: bytes, usage: Usage | None) -> bytes:
        if self._spec.include_continuous_usage:
            tail += b',"usage":' + (usage or self._count()).to_json()
        return b"%b%b]%b}\n\n" % (self._head, sse.one_line(entry), sse.one_line(tail))


class BodyPresenter:
    """One JSON body when every choice has ended."""

    def __init__(
        self,
        spec: OutputSpec,
        object_name: str,
        entry: Callable[[Choice], bytes],
        count: Callable[[], Usage],
        *,
        fingerprint: str,
        tail: Callable[[Choice], bytes] = lambda _: b"",
    ) -> None:
        """Prepare a body.

        Args:
            spec: What it shows.
            object_name: Its kind.
            entry: Gives the `choices` entry of a choice.
            count: Gives the usage.
            fingerprint: Of the system.
            tail: Gives further members of the object, once, from the first choice.
        """
        self._tail = tail
        self._head = head(spec, object_name) + b',"choices":['
        self._entry = entry
        self._count = count
        self._fingerprint = b',"system_fingerprint":' + encode(fingerprint)
        self._is_done = False

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Nothing until the end, then everything."""
        if self._is_done or any(choice.end is None for choice in choices):
            for choice in choices:
                choice.text.delta.compact()
            return b""
        self._is_done = True
        entries = b",".join(self._entry(choice) for choice in choices)
        usage = b'],"usage":' + self._count().to_json()
        tail = self._tail(choices[0])
        if choices[0].prompt_token_ids:  # what no entry has shown: the prompt of a chat
            tail += b',"prompt_token_ids":' + prompt_ids(choices[0])
        return self._head + entries + usage + tail + self._fingerprint + b"}"

    def kept(self) -> bytes:
        """The body itself is the object."""
        return b""
