"""Log-probabilities as OpenAI shows them, for chats and for completions.

JSON has no infinities: what is not finite is shown as -9999.0. The text of a token that is part
of a character is decoded together with the bytes before it and is never empty.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

from services.detokenizer.choice import Choice, LogprobEntry
from services.detokenizer.text import IncrementalDecoder
from shared.glm.tokenizer import Vocabulary

FLOOR = -9999.0


def finite(value: float) -> float:
    """The value, or the documented floor."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


class LogprobWriter:
    """Turns entries into the objects of a response."""

    def __init__(self, vocabulary: Vocabulary, *, num_top: int, shows_ids: bool = False) -> None:
        """Show at most `num_top` alternatives per token; `shows_ids` in place of their text."""
        self._vocabulary = vocabulary
        self._bytes = vocabulary.token_bytes
        self._num_top = num_top
        self._shows_ids = shows_ids

    def chat(self, entries: Sequence[LogprobEntry]) -> dict[str, Any]:
        """The logprobs object of a chat choice."""
        return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}

    def completion(self, entries: Sequence[LogprobEntry], *, shift: int = 0) -> dict[str, Any]:
        """The logprobs object of a completion choice; `shift` is the length of an echoed prompt."""
        return {
            "text_offset": [shift + entry.offset for entry in entries],
            "token_logprobs": [finite(entry.values.logprob) for entry in entries],
            "tokens": [self._text(entry.token_id, entry.context) for entry in entries],
            "top_logprobs": [self._top_of_completion(entry) for entry in entries],
        }

    def prompt(self, choice: Choice) -> list[dict[str, Any] | None]:
        """What each token of a prompt was worth: nothing for the first, else tokens by their id."""
        ids = array("I", choice.measured_token_ids).tolist()
        shown: list[dict[str, Any] | None] = [None]
        for token_id, values in zip(ids[1:], choice.prompt_logprobs, strict=True):
            pairs = zip(values.top_token_ids, values.top_logprobs, strict=True)
            found = {i: (value, rank) for rank, (i, value) in enumerate(pairs, 1)}
            found.setdefault(token_id, (values.logprob, values.rank))
            shown.append(
                {
                    str(i): {
                        "logprob": finite(value),
                        "rank": rank,
                        "decoded_token": self._text(i, b""),
                    }
                    for i, (value, rank) in found.items()
                }
            )
        return shown

    def echoed(self, choice: Choice) -> dict[str, list[Any]]:
        """The prompt's part of the logprobs of a completion that echoes it."""
        ids = array("I", choice.measured_token_ids).tolist()
        decoder, offset = IncrementalDecoder(self._vocabulary), 0
        columns: dict[str, list[Any]] = {
            name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        }
        for place, token_id in enumerate(ids):
            columns["text_offset"].append(offset)
            entry = None
            if place:
                values = choice.prompt_logprobs[place - 1]
                entry = LogprobEntry(token_id, decoder.pending, offset, values)
            columns["tokens"].append(self._text(token_id, decoder.pending))
            columns["token_logprobs"].append(finite(entry.values.logprob) if entry else None)
            columns["top_logprobs"].append(self._top_of_completion(entry) if entry else None)
            offset += len(decoder.push(token_id))
        return columns

    def _chat_entry(self, entry: LogprobEntry) -> dict[str, Any]:
        values = entry.values
        shown = self._one(entry.token_id, values.logprob, entry.context)
        shown["top_logprobs"] = [
            self._one(token_id, logprob, entry.context) for token_id, logprob in self._top(entry)
        ]
        return shown

    def _one(self, token_id: int, logprob: float, context: bytes) -> dict[str, Any]:
        return {
            "token": self._text(token_id, context),
            "logprob": finite(logprob),
            "bytes": list(self._raw(token_id)),
        }

    def _top_of_completion(self, entry: LogprobEntry) -> dict[str, float] | None:
        if self._num_top == 0:
            return None
        shown: dict[str, float] = {}
        for token_id, logprob in self._top(entry):
            # Alternatives with the same text: the most likely one is shown.
            shown.setdefault(self._text(token_id, entry.context), finite(logprob))
        shown.setdefault(self._text(entry.token_id, entry.context), finite(entry.values.logprob))
        return shown

    def _top(self, entry: LogprobEntry) -> list[tuple[int, float]]:
        values = entry.values
        pairs = zip(values.top_token_ids, values.top_logprobs, strict=True)
        return list(pairs)[: self._num_top]

    def _text(self, token_id: int, context: bytes) -> str:
        if self._shows_ids:
            return f"token_id:{token_id}"
        return (context + self._raw(token_id)).decode("utf-8", "replace")

    def _raw(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""
