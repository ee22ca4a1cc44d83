"""Log-probabilities as OpenAI shows them, for chats and for completions.

JSON has no infinities: what is not finite is shown as -9999.0. The text of a token that is part
of a character is decoded together with the bytes before it and is never empty.
"""

import math
from collections.abc import Sequence
from typing import Any

from services.detokenizer.choice import LogprobEntry
from shared.glm.tokenizer import Vocabulary

FLOOR = -9999.0


def finite(value: float) -> float:
    """The value, or the documented floor."""
    return max(value, FLOOR) if math.isfinite(value) else FLOOR


class LogprobWriter:
    """Turns entries into the objects of a response."""

    def __init__(self, vocabulary: Vocabulary, *, num_top: int, shows_ids: bool = False) -> None:
        """Show at most `num_top` alternatives per token; `shows_ids` in place of their text."""
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
