"""Text completions: `choices` entries of chunks and of the whole object."""

from typing import Any

import msgspec

from services.detokenizer.assemble import encode, prompt_ids
from services.detokenizer.choice import Choice
from services.detokenizer.logprobs import LogprobWriter
from services.detokenizer.messages import OutputSpec

OBJECT = "text_completion"


class CompletionChunks:
    """Entries of streamed text_completion objects."""

    def __init__(self, spec: OutputSpec, logprobs: LogprobWriter) -> None:
        """Entries as `spec` wants them; an echoed prompt comes before the first text."""
        self._spec = spec
        self._logprobs = logprobs
        self._echoes = dict(enumerate(spec.echo_texts))

    def opening(self, choice: Choice) -> None:
        """Completions have no role to tell."""

    def entries(self, choice: Choice) -> tuple[bytes, ...]:
        """One entry for everything new, the finish reason included."""
        if not (choice.text.delta or choice.end or choice.logprobs or choice.token_ids):
            return ()
        spec = self._spec
        text = self._echoes.pop(choice.index, "") + "".join(choice.text.take().content)
        logprobs = b"null"
        is_echoed = bool(spec.echo_texts and choice.measured_token_ids)
        if spec.include_logprobs and (choice.logprobs or is_echoed):
            logprobs = encode(_logprobs_of(spec, self._logprobs, choice))
        ids = encode(choice.token_ids) if spec.return_token_ids else b"null"
        choice.logprobs, choice.token_ids = [], []
        reason = stop_reason = b"null"
        if choice.end is not None:
            reason, stop_reason = encode(choice.end.finish_reason), encode(choice.end.stop_reason)
        return (
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b'
            b',"prompt_token_ids":%b,"token_ids":%b}'
            % (choice.index, encode(text), logprobs, reason, stop_reason, prompt_ids(choice), ids),
        )


def completion_entry(spec: OutputSpec, logprobs: LogprobWriter, choice: Choice) -> bytes:
    """The entry of a finished choice in a text_completion object."""
    end = choice.end
    assert end is not None
    shift = echo_length(spec, choice.index)
    echo = spec.echo_texts[choice.index] if shift else ""
    entry: dict[str, Any] = {
        "index": choice.index,
        "text": echo + "".join(choice.text.take().content),
        "logprobs": _logprobs_of(spec, logprobs, choice) if spec.include_logprobs else None,
        "finish_reason": end.finish_reason,
        "stop_reason": end.stop_reason,
    }
    if choice.measured_token_ids:
        entry["prompt_logprobs"] = logprobs.prompt(choice)
    if spec.return_token_ids:
        entry["prompt_token_ids"] = msgspec.Raw(prompt_ids(choice))
        entry["token_ids"] = choice.token_ids
    return encode(entry)


def _logprobs_of(spec: OutputSpec, logprobs: LogprobWriter, choice: Choice) -> dict[str, Any]:
    """Of the output, behind those of a prompt that is echoed, which are shown once."""
    shift = echo_length(spec, choice.index)
    shown = logprobs.completion(choice.logprobs, shift=shift)
    if spec.echo_texts and choice.measured_token_ids:
        echoed = logprobs.echoed(choice)
        shown = {name: echoed[name] + column for name, column in shown.items()}
        choice.measured_token_ids = b""
    return shown


def echo_length(spec: OutputSpec, index: int) -> int:
    """Characters of the prompt that is put before a choice's text."""
    return len(spec.echo_texts[index]) if index < len(spec.echo_texts) else 0
