"""The `message` object of the Messages API: content blocks in the order of the output."""

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice
from services.detokenizer.messages import OutputSpec
from services.detokenizer.ordered import Kind, OrderedDelta, Run
from services.detokenizer.response_object import complete_runs
from services.detokenizer.usage import Usage

_STOP_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class MessageBody:
    """The whole message when the choice has ended."""

    def __init__(self, spec: OutputSpec, count: Callable[[], Usage]) -> None:
        """Prepare."""
        self._spec = spec
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
        blocks = [block_of(run) for run in complete_runs(delta.runs, choice)]
        return encode(
            message_head(self._spec)
            | {"content": blocks}
            | ending_of(choice)
            | {"usage": usage_of(self._count())}
        )

    def kept(self) -> bytes:
        """Messages are not kept."""
        return b""


def message_head(spec: OutputSpec) -> dict[str, Any]:
    """The beginning of every message."""
    return {"id": spec.response_id, "type": "message", "role": "assistant", "model": spec.model}


def block_of(run: Run) -> dict[str, Any]:
    """A whole run as a content block."""
    if run.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": run.text, "signature": signature_of(run.text)}
    if run.kind is Kind.CONTENT:
        return {"type": "text", "text": run.text}
    return {
        "type": "tool_use",
        "id": run.call_id,
        "name": run.name,
        # The text of a complete call is one strict JSON object.
        "input": msgspec.Raw(run.text.encode()),
    }


def ending_of(choice: Choice) -> dict[str, Any]:
    """Why the message ended."""
    end = choice.end
    assert end is not None
    matched = end.stop_reason if isinstance(end.stop_reason, str) else None
    reason = "stop_sequence" if matched is not None else _STOP_REASONS[end.finish_reason]
    return {"stop_reason": reason, "stop_sequence": matched}


def usage_of(usage: Usage) -> dict[str, int]:
    """Token counts under this API's names: cached tokens are no input tokens here."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }


def signature_of(text: str) -> str:
    """A mark that clients carry with a thinking block: a digest of its text, no proof of origin."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
