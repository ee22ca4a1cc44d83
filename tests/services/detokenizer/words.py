"""The tests' own vocabulary: 256 single bytes, some words, all control tokens."""

import re
from collections.abc import Sequence

from shared.glm.tokenizer import Vocabulary
from shared.glm.tokens import SPELLINGS, ControlTokens

WORDS = ["get_weather", "city", "Paris", " the", "é", "日本", "😀", "\n\n", " \n", "now", "12", '"']
_ADDED = {text: 256 + len(WORDS) + i for i, text in enumerate(SPELLINGS.values())}
_NOT_SPECIAL = re.compile(r"</?(think|tool_call|tool_response|arg_key|arg_value)>\Z")
_BYTES = (
    *(bytes([i]) for i in range(256)),
    *(word.encode() for word in WORDS),
    *(text.encode() for text in _ADDED),
)


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


VOCABULARY = Vocabulary(
    token_bytes=_BYTES,
    token_texts=tuple(map(_whole, _BYTES)),
    token_strings=tuple(
        data.decode("latin-1") if len(data) == 1 else data.decode() for data in _BYTES
    ),
    added_ids=frozenset(_ADDED.values()),
    special_ids=frozenset(i for text, i in _ADDED.items() if not _NOT_SPECIAL.match(text)),
    control=ControlTokens.resolve(_ADDED),
)
EOS = VOCABULARY.control.end_of_text
_PIECES = re.compile("(" + "|".join(map(re.escape, [*_ADDED, *WORDS])) + ")")


def ids(text: str, *, ordinary: Sequence[str] = ()) -> list[int]:
    """Tokens of a text; control spellings in `ordinary` are spelled out in bytes."""
    result: list[int] = []
    for piece in _PIECES.split(text):
        if piece in _ADDED and piece not in ordinary:
            result.append(_ADDED[piece])
        elif piece in WORDS:
            result.append(256 + WORDS.index(piece))
        else:
            result.extend(piece.encode())
    return result
