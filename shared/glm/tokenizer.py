"""The tokenizer of a checkpoint, read from its tokenizer.json.

Two views of one file. `encode` cuts a text at the spellings of added tokens itself and gives only
the text between them to the library, through a copy of the tokenizer that has no added tokens;
so the caller alone decides whether a spelling is a control token. `Vocabulary` holds what each id
stands for, as bytes, for decoding without the library.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from shared.errors import CheckpointError, FailureReason, RequestError
from shared.glm.tokens import ControlTokens

# From here on the batch call is used: unlike the single one it lets other threads run.
_POOL_CHARS = 4_096
# What a template writes between control tokens is short and the same in every prompt: texts of up
# to so many characters are remembered, and so many of them. The library takes 20 us for the least.
_SHORT_CHARS = 32
_MAX_SHORT_TEXTS = 4_096

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What every token id stands for.

    `token_bytes[id]` are the bytes of a token, empty for an id that is in no table.
    `token_texts[id]` is the same as text when the bytes are whole characters, else None.
    `added_ids` are the added (control) tokens, `special_ids` those of them flagged special.
    """

    token_bytes: tuple[bytes, ...]
    token_texts: tuple[str | None, ...]
    token_strings: tuple[str, ...]
    added_ids: frozenset[int]
    special_ids: frozenset[int]
    control: ControlTokens

    def __len__(self) -> int:
        return len(self.token_bytes)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of a run of tokens; broken UTF-8 becomes U+FFFD, unknown ids nothing."""
        table, size = self.token_bytes, len(self.token_bytes)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = (table[i] for i in ids if 0 <= i < size and i not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")


class GlmTokenizer:
    """Text to ids and back for one checkpoint."""

    def __init__(self, source: Mapping[str, Any], *, name: str = "tokenizer.json") -> None:
        """Build both views from a parsed tokenizer.json; `name` stands in error texts."""
        added = _read_added_tokens(source, name)
        self.added_tokens: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.vocabulary = _read_vocabulary(source, name)
        self._plain = _build_plain(source, self.added_tokens)
        self._short_texts: dict[str, list[int]] = {}
        by_length = sorted(self.added_tokens, key=len, reverse=True)
        self._spellings = re.compile("|".join(map(re.escape, by_length)))
        self._cut = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")

    @classmethod
    def load(cls, model_dir: Path) -> "GlmTokenizer":
        """Read `model_dir`/tokenizer.json."""
        return _load(model_dir, lambda source, name: cls(source, name=name))

    @property
    def spellings(self) -> re.Pattern[str]:
        """Matches any spelling of an added token."""
        return self._spellings

    def encode(self, text: str, *, allow_control: bool) -> list[int]:
        """Ids of a text.

        Args:
            text: Any text without lone surrogates.
            allow_control: Whether a spelling of an added token becomes that token.
        """
        pieces = self._cut.split(text) if allow_control else [text]
        return self.encode_pieces(pieces)

    def encode_pieces(self, pieces: list[str]) -> list[int]:
        """Ids of texts (even positions) and spellings of added tokens (odd positions), joined."""
        runs = iter(self._encode_texts([piece for piece in pieces[::2] if piece]))
        added, ids = self.added_tokens, []
        for position, piece in enumerate(pieces):
            if position % 2:
                ids.append(added[piece])
            elif piece:
                ids.extend(next(runs))
        return ids

    def split_control(self, text: str) -> list[str]:
        """A text cut into ordinary runs (even positions) and spellings (odd positions)."""
        return self._cut.split(text)

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        try:
            if sum(map(len, texts)) >= _POOL_CHARS:
                batch = self._plain.encode_batch_fast(texts, add_special_tokens=False)
                return [encoding.ids for encoding in batch]
            return [self._encode_text(text) for text in texts]
        except TypeError as exc:  # how the library says it
            raise RequestError(
                FailureReason.INVALID_ARGUMENT, "the text holds a lone surrogate"
            ) from exc

    def _encode_text(self, text: str) -> list[int]:
        """The ids, for reading only."""
        is_short = len(text) <= _SHORT_CHARS
        if is_short and (known := self._short_texts.get(text)) is not None:
            return known
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if is_short:
            if len(self._short_texts) >= _MAX_SHORT_TEXTS:
                self._short_texts.clear()
            self._short_texts[text] = ids
        return ids


def load_vocabulary(model_dir: Path) -> Vocabulary:
    """The vocabulary of `model_dir`/tokenizer.json, for who decodes only."""
    return _load(model_dir, _read_vocabulary)


def _load(model_dir: Path, build: Callable[[Mapping[str, Any], str], T]) -> T:
    path = model_dir / "tokenizer.json"
    try:
        source = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    try:
        return build(source, str(path))
    except (KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{path}: not a tokenizer: {exc!r}") from exc


def _read_vocabulary(source: Mapping[str, Any], name: str) -> Vocabulary:
    if (source.get("decoder") or {}).get("type") != "ByteLevel":
        raise CheckpointError(f"{name}: the decoder is not ByteLevel")
    return _build_vocabulary(source["model"]["vocab"], _read_added_tokens(source, name))


def _read_added_tokens(source: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    added: list[Mapping[str, Any]] = source.get("added_tokens") or []
    for token in added:
        loose = [key for key in ("lstrip", "rstrip", "single_word") if token.get(key)]
        if loose:
            raise CheckpointError(
                f"{name}: added token {token['content']!r} has {loose[0]}, which is not supported"
            )
    return added


def _build_plain(source: Mapping[str, Any], added: Mapping[str, int]) -> Tokenizer:
    # Entries of the model's own vocabulary that spell an added token go too: a plain text must
    # never become a control token.
    model = dict(source["model"])
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in added}
    plain = {**source, "model": model, "added_tokens": [], "post_processor": None}
    return Tokenizer.from_str(json.dumps(plain))


def _build_vocabulary(vocab: Mapping[str, int], added: list[Mapping[str, Any]]) -> Vocabulary:
    size = 1 + max([*vocab.values(), *(token["id"] for token in added)])
    strings, pieces = [""] * size, [b""] * size
    byte_of = _byte_of_character()
    for text, token_id in vocab.items():
        strings[token_id] = text
        pieces[token_id] = _bytes_of(text, byte_of)
    for token in added:
        strings[token["id"]] = token["content"]
        pieces[token["id"]] = token["content"].encode()
    return Vocabulary(
        token_bytes=tuple(pieces),
        token_texts=tuple(_whole_text(piece) for piece in pieces),
        token_strings=tuple(strings),
        added_ids=frozenset(token["id"] for token in added),
        special_ids=frozenset(token["id"] for token in added if token.get("special")),
        control=ControlTokens.resolve({token["content"]: token["id"] for token in added}),
    )


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest moves to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(moved)})
    return table


def _bytes_of(text: str, byte_of: Mapping[str, int]) -> bytes:
    try:
        return bytes([byte_of[character] for character in text])
    except KeyError:  # not in the alphabet: such an entry stands for itself
        return text.encode()


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
