"""Tokens -> text, piece by piece: no character is ever shown in halves.

Works on the bytes of tokens. Most tokens are whole characters and come from a table; only the bytes
of a character that is not complete yet are kept, at most three. Bytes that can never become a
character turn into U+FFFD at once, so nothing is held for longer than one character.
"""

import codecs

from shared.glm.tokenizer import Vocabulary


class IncrementalDecoder:
    """Text of one field: the pieces joined equal the decoding of the whole."""

    __slots__ = ("_pending", "_token_bytes", "_token_texts")

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start with nothing pending."""
        self._token_texts = vocabulary.token_texts
        self._token_bytes = vocabulary.token_bytes
        self._pending = b""

    @property
    def pending(self) -> bytes:
        """Bytes of a character whose rest has not come yet."""
        return self._pending

    def push(self, token_id: int) -> str:
        """The characters that a token completes; none for an id that no token has."""
        if not self._pending:
            try:
                text = self._token_texts[token_id]
            except IndexError:
                return ""
            if text is not None:
                return text
        elif token_id >= len(self._token_bytes):
            return ""
        data = self._pending + self._token_bytes[token_id]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """U+FFFD for a character that stays incomplete, else nothing."""
        if not self._pending:
            return ""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text
