"""Token ids out: the answer of the generate endpoint, whole and streamed, text beside it on demand.

Every generated id is there, end tokens included, as soon as it was sampled; the text may lag behind
by a character or a stop string that is not complete.
"""

from typing import Any, Final

from services.detokenizer.assemble import encode
from services.detokenizer.choice import Choice, LogprobEntry
from services.detokenizer.logprobs import finite
from services.detokenizer.messages import OutputSpec

OBJECT: Final = "generate"


class TokenChunks:
    """Entries of streamed answers."""

    def __init__(self, spec: OutputSpec) -> None:
        """Entries as `spec` wants them."""
        self._spec = spec

    def opening(self, choice: Choice) -> None:
        """Nothing comes before the first ids."""

    def entries(self, choice: Choice) -> tuple[bytes, ...]:
        """One entry for everything new, the finish reason included."""
        if not (choice.token_ids or choice.text.delta or choice.end):
            return ()
        return (encode(_entry(self._spec, choice)),)


def token_entry(spec: OutputSpec, choice: Choice) -> bytes:
    """The entry of a finished choice."""
    return encode(_entry(spec, choice))


def _entry(spec: OutputSpec, choice: Choice) -> dict[str, Any]:
    end, ids = choice.end, choice.token_ids
    text, entries = "".join(choice.text.take().content), choice.logprobs
    choice.token_ids, choice.logprobs = [], []
    entry: dict[str, Any] = {"index": choice.index, "token_ids": ids}
    if spec.include_text:
        entry["text"] = text
    entry["logprobs"] = None
    if spec.include_logprobs and entries:
        entry["logprobs"] = {"content": [_logprob(one, spec.num_top_logprobs) for one in entries]}
    entry["finish_reason"] = end.finish_reason if end is not None else None
    entry["stop_reason"] = end.stop_reason if end is not None else None
    return entry


def _logprob(entry: LogprobEntry, num_top: int) -> dict[str, Any]:
    values = entry.values
    pairs = list(zip(values.top_token_ids, values.top_logprobs, strict=True))[:num_top]
    return {
        "token_id": entry.token_id,
        "logprob": finite(values.logprob),
        "rank": values.rank,
        "top_logprobs": [{"token_id": i, "logprob": finite(value)} for i, value in pairs],
    }
