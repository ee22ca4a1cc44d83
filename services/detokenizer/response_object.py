"""The `response` object of the Responses API: its items, its usage, the object around them.

Items stand in the order in which the model wrote them. A call that was cut off is left out of the
object: its arguments are no JSON. Only the item in which the output was cut is incomplete: a call
that is whole is completed, also where the output ends right behind it.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice, LogprobEntry
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.messages import OutputSpec
from services.detokenizer.ordered import Kind, OrderedDelta, Run
from services.detokenizer.usage import Usage

OBJECT: Final = "response"
# How reasoning begins that a client carries for us; the frontend reads it back.
SEAL: Final = "glm1:"
_PREFIXES: Final = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}


@dataclass(slots=True)
class Item:
    """One item of the output, as far as it came."""

    kind: Kind
    item_id: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text or arguments so far."""
        return "".join(self.pieces)


class ItemWriter:
    """Makes the items of one response.

    Args:
        spec: What the client wants to see.
        logprobs: Writes log-probabilities.
    """

    def __init__(self, spec: OutputSpec, logprobs: LogprobWriter) -> None:
        """Prepare."""
        self._spec = spec
        self._logprobs = logprobs
        self._suffix = spec.response_id.rpartition("_")[2]

    def begin(self, run: Run, position: int) -> Item:
        """The item of a new run at a place of the output."""
        item_id = f"{_PREFIXES[run.kind]}_{self._suffix}{position:02x}"
        return Item(run.kind, item_id, run.call_id, run.name)

    def logprobs_of(self, entries: list[LogprobEntry]) -> list[dict[str, Any]]:
        """Log-probabilities of the content among some tokens, in the form of this API."""
        shown = [entry for entry in entries if entry.is_content]
        return list(self._logprobs.chat(shown)["content"]) if shown else []

    def whole(self, item: Item, status: str) -> dict[str, Any]:
        """The item as the client gets it."""
        if item.kind is Kind.CALL:
            return {
                "type": "function_call",
                "id": item.item_id,
                "call_id": item.call_id,
                "name": item.name,
                "arguments": item.text,
                "status": status,
            }
        if item.kind is Kind.CONTENT:
            return {
                "type": "message",
                "id": item.item_id,
                "role": "assistant",
                "status": status,
                "content": [self.part(item)],
            }
        reasoning = {
            "type": "reasoning",
            "id": item.item_id,
            "summary": [],
            "content": [self.part(item)],
            "status": status,
        }
        if self._spec.include_sealed_reasoning:
            reasoning["encrypted_content"] = seal(item.text)
        return reasoning

    def empty(self, item: Item) -> dict[str, Any]:
        """The item before its first text."""
        shown = self.whole(Item(item.kind, item.item_id, item.call_id, item.name), "in_progress")
        shown.pop("encrypted_content", None)
        return shown if item.kind is Kind.CALL else {**shown, "content": []}

    def part(self, item: Item) -> dict[str, Any]:
        """The only part of a message or of reasoning."""
        if item.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": item.text}
        return {
            "type": "output_text",
            "text": item.text,
            "annotations": [],
            "logprobs": item.logprobs,
        }


class ResponseHead:
    """The object around the items."""

    def __init__(self, spec: OutputSpec) -> None:
        """Keep what never changes."""
        head = {"id": spec.response_id, "object": OBJECT, "created_at": spec.created_s}
        self._head = encode({**head, "model": spec.model})[:-1]
        self._echo = b"," + spec.echo_members if spec.echo_members else b""

    def render(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None,
    ) -> bytes:
        """The object; `usage` is known at the end."""
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        fields = {
            "status": status,
            "error": None,
            "incomplete_details": reason,
            "output": output,
            "usage": msgspec.Raw(usage_json(usage)),
        }
        return self._head + b"," + encode(fields)[1:-1] + self._echo + b"}"


class ResponseBody:
    """The whole object when the choice has ended."""

    def __init__(
        self, spec: OutputSpec, logprobs: LogprobWriter, count: Callable[[], Usage]
    ) -> None:
        """Prepare."""
        self._writer = ItemWriter(spec, logprobs)
        self._head = ResponseHead(spec)
        self._count = count
        self._is_done = False

    def render(self, choices: Sequence[Choice]) -> bytes:
        """Nothing until the end, then everything."""
        choice = choices[0]
        if self._is_done or choice.end is None:
            choice.text.delta.compact()
            return b""
        self._is_done = True
        delta = choice.text.take()
        assert isinstance(delta, OrderedDelta)
        shown: list[dict[str, Any]] = []
        logprobs = self._writer.logprobs_of(choice.logprobs)
        for run in complete_runs(delta.runs, choice):
            item = self._writer.begin(run, len(shown))
            item.pieces = run.pieces
            item.logprobs = [logprobs[token] for token in run.tokens] if logprobs else []
            status = status_of_last(item, choice) if run is delta.runs[-1] else "completed"
            shown.append(self._writer.whole(item, status))
        return self._head.render(status_of(choice), shown, self._count())

    def kept(self) -> bytes:
        """The body itself is the object."""
        return b""


def complete_runs(runs: list[Run], choice: Choice) -> list[Run]:
    """Runs without the call that was cut off."""
    return [run for run in runs if run.kind is not Kind.CALL or run.index < choice.text.num_calls]


def status_of(choice: Choice) -> str:
    """How a response ended."""
    assert choice.end is not None
    return "incomplete" if choice.end.finish_reason == "length" else "completed"


def status_of_last(item: Item, choice: Choice) -> str:
    """How the item ended that the output ended in; calls are whole here."""
    return "completed" if item.kind is Kind.CALL else status_of(choice)


def usage_json(usage: Usage | None) -> bytes:
    """Token counts under this API's names."""
    if usage is None:
        return b"null"
    return encode(
        {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }
    )


def seal(text: str) -> str:
    """Reasoning in a form that clients carry without looking into it; it is no secret."""
    return SEAL + base64.b64encode(text.encode()).decode()
