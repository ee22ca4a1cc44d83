"""Chat completions: `choices` entries of chunks and of the whole object.

Reasoning is shown under two names, `reasoning` (vLLM) and `reasoning_content` (the vendor's API).
A call that was cut off is shown as far as it came in a stream, and not at all in a body: a
body never holds arguments that are no JSON.
"""

from typing import Any

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice
from services.detokenizer.delta import Delta, ToolPiece
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.messages import OutputSpec

CHUNK = "chat.completion.chunk"
OBJECT = "chat.completion"
_TEXT_ALONE = b'{"index":%d,"delta":{%b},"logprobs":null,"finish_reason":null,"token_ids":null}'
_ENTRY = b'{"index":%d,"delta":{%b},"logprobs":%b%b,"token_ids":%b}'
_NO_END = b',"finish_reason":null'


class ChatChunks:
    """Entries of chat.completion.chunk objects."""

    def __init__(self, spec: OutputSpec, logprobs: LogprobWriter) -> None:
        """Entries as `spec` wants them."""
        self._spec = spec
        self._logprobs = logprobs
        self._is_text_alone = not (spec.include_logprobs or spec.return_token_ids)

    def opening(self, choice: Choice) -> bytes:
        """The role comes first, and the text that the answer goes on with."""
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":%b}'
            b',"logprobs":null,"finish_reason":null}'
            % (choice.index, encode(echo_of(self._spec, choice)))
        )

    def entries(self, choice: Choice) -> tuple[bytes, ...]:
        """One entry for everything new, the finish reason included.

        But not beside a piece of a call: OpenAI's stream helper tells that a call is done when
        something comes behind it, and nothing comes behind the reason.
        """
        if self._is_text_alone and choice.end is None:  # what nearly every token is
            text = _delta_json(choice.text.take(), self._spec) if choice.text.delta else b""
            return (_TEXT_ALONE % (choice.index, text),) if text else ()
        has_calls = bool(choice.text.delta.tools)
        delta = _delta_json(choice.text.take(), self._spec) if choice.text.delta else b""
        logprobs, ids = self._extras(choice)
        if not delta and choice.end is None and not choice.logprobs and not choice.token_ids:
            return ()
        choice.logprobs, choice.token_ids = [], []
        index = choice.index
        if choice.end is None:
            return (_ENTRY % (index, delta, logprobs, _NO_END, ids),)
        end = b',"finish_reason":%b,"stop_reason":%b' % (
            encode(choice.end.finish_reason),
            encode(choice.end.stop_reason),
        )
        if delta and has_calls:
            first = _ENTRY % (index, delta, logprobs, _NO_END, ids)
            return first, _ENTRY % (index, b"", b"null", end, b"null")
        return (_ENTRY % (index, delta, logprobs, end, ids),)

    def _extras(self, choice: Choice) -> tuple[bytes, bytes]:
        logprobs = b"null"
        if self._spec.include_logprobs and choice.logprobs:
            logprobs = encode(self._logprobs.chat(choice.logprobs))
        ids = encode(choice.token_ids) if self._spec.return_token_ids else b"null"
        return logprobs, ids


def chat_entry(spec: OutputSpec, logprobs: LogprobWriter, choice: Choice) -> bytes:
    """The entry of a finished choice in a chat.completion object."""
    delta, end = choice.text.take(), choice.end
    assert end is not None
    reasoning = "".join(delta.reasoning) or None if spec.include_reasoning else None
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echo_of(spec, choice) + "".join(delta.content) or None,
        "refusal": None,
        "reasoning": reasoning,
        "reasoning_content": reasoning,
    }
    complete = range(choice.text.num_calls)
    calls = [piece for piece in _shown_calls(delta, spec) if piece.index in complete]
    if calls:
        message["tool_calls"] = [_call(piece) for piece in calls]
    entry: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs.chat(choice.logprobs) if spec.include_logprobs else None,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
    }
    if spec.return_token_ids:
        entry["token_ids"] = choice.token_ids
    return encode(entry)


def echo_of(spec: OutputSpec, choice: Choice) -> str:
    """What of the prompt is put before a choice's text."""
    return spec.echo_texts[choice.index] if choice.index < len(spec.echo_texts) else ""


def _delta_json(delta: Delta, spec: OutputSpec) -> bytes:
    fields: list[bytes] = []
    if delta.reasoning and spec.include_reasoning:
        text = encode("".join(delta.reasoning))
        fields.append(b'"reasoning":%b,"reasoning_content":%b' % (text, text))
    if delta.content:
        fields.append(b'"content":' + encode("".join(delta.content)))
    if delta.tools:
        pieces = [_piece_json(piece) for piece in _shown_calls(delta, spec)]
        if pieces:
            fields.append(b'"tool_calls":[' + b",".join(pieces) + b"]")
    return b",".join(fields)


def _shown_calls(delta: Delta, spec: OutputSpec) -> list[ToolPiece]:
    pieces = delta.merged_tools()
    if not spec.parallel_tool_calls:
        return [piece for piece in pieces if piece.index == 0]
    return pieces


def _piece_json(piece: ToolPiece) -> bytes:
    arguments = encode(piece.arguments)
    if not piece.call_id:
        return b'{"index":%d,"function":{"arguments":%b}}' % (piece.index, arguments)
    return b'{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}' % (
        piece.index,
        encode(piece.call_id),
        encode(piece.name),
        arguments,
    )


def _call(piece: ToolPiece) -> dict[str, Any]:
    return {
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }
