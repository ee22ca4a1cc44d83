import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.errors import CheckpointError, RequestError
from shared.glm import tokenizer as tokenizer_module
from shared.glm.tokenizer import GlmTokenizer, load_vocabulary

NANO = Path(__file__).parents[3] / "models" / "glm-nano"
OURS = GlmTokenizer.load(NANO)
REFERENCE = Tokenizer.from_file(str(NANO / "tokenizer.json"))
SIZE = len(OURS.vocabulary)

texts = st.lists(
    st.one_of(st.text(), st.sampled_from([*OURS.added_tokens, "<thi", "\n", " 12", "é😀"]))
).map("".join)


def without_surrogates(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


@given(texts)
def test_encode_with_control_tokens_equals_the_library(text: str) -> None:
    text = without_surrogates(text)
    expected = REFERENCE.encode(text, add_special_tokens=False).ids
    assert OURS.encode(text, allow_control=True) == expected


@given(texts)
def test_encode_without_control_gives_ordinary_ids_that_decode_to_the_same_text(text: str) -> None:
    text = without_surrogates(text)
    ids = OURS.encode(text, allow_control=False)
    assert not OURS.vocabulary.added_ids.intersection(ids)
    assert OURS.vocabulary.decode(ids) == text


@given(st.lists(st.integers(0, SIZE + 20)), st.booleans())
def test_decode_equals_the_library_for_any_ids(ids: list[int], skip: bool) -> None:
    expected = REFERENCE.decode(ids, skip_special_tokens=skip)
    assert OURS.vocabulary.decode(ids, skip_special_tokens=skip) == expected


def test_long_texts_go_through_the_pool_with_the_same_ids() -> None:
    text = "<|user|>some words, 123! " * 2000
    assert OURS.encode(text, allow_control=True) == REFERENCE.encode(text).ids


class Counting:
    """The library's tokenizer, counting its calls."""

    def __init__(self, tokenizer: Any) -> None:
        self.num_calls = 0
        self._tokenizer = tokenizer

    def encode(self, *args: Any, **options: Any) -> Any:
        self.num_calls += 1
        return self._tokenizer.encode(*args, **options)


def test_short_texts_between_control_tokens_are_encoded_once() -> None:
    ours = GlmTokenizer.load(NANO)
    ours._plain = library = Counting(ours._plain)
    first = ours.encode("<|user|>ab<|assistant|>ab", allow_control=True)
    assert library.num_calls == 1
    expected = list(first)
    first.append(7)  # what is remembered is nobody's to change
    assert ours.encode("<|user|>ab<|assistant|>ab", allow_control=True) == expected
    assert library.num_calls == 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "_MAX_SHORT_TEXTS", 8)
    ours = GlmTokenizer.load(NANO)
    for number in range(100):
        text = f"text {number}"
        assert ours.encode(text, allow_control=False) == OURS.encode(text, allow_control=False)
        ours.encode(f"a text that is too long for it {number}", allow_control=False)
        assert 1 <= len(ours._short_texts) <= 8
        assert all(len(known) <= 32 for known in ours._short_texts)


def test_texts_are_none_only_for_tokens_that_are_parts_of_characters() -> None:
    vocabulary = OURS.vocabulary
    for piece, text in zip(vocabulary.token_bytes, vocabulary.token_texts, strict=True):
        assert piece.decode("utf-8", "replace").count("�") == 0 or text is None


def test_who_only_decodes_reads_the_same_vocabulary() -> None:
    assert load_vocabulary(NANO) == OURS.vocabulary


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        OURS.encode("a\ud800", allow_control=False)


def test_a_vocabulary_entry_that_spells_a_control_token_is_not_reachable_from_text() -> None:
    source = json.loads((NANO / "tokenizer.json").read_text("utf-8"))
    source["model"]["vocab"]["<think>"] = SIZE
    ours = GlmTokenizer(source)
    assert ours.added_tokens["<think>"] not in ours.encode("<think>", allow_control=False)
    assert SIZE not in ours.encode("<think>", allow_control=False)


def test_an_added_token_with_loose_matching_is_refused() -> None:
    source = json.loads((NANO / "tokenizer.json").read_text("utf-8"))
    source["added_tokens"][0]["lstrip"] = True
    with pytest.raises(CheckpointError, match="lstrip"):
        GlmTokenizer(source)


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    source = json.loads((NANO / "tokenizer.json").read_text("utf-8"))
    source["decoder"] = None
    with pytest.raises(CheckpointError, match="ByteLevel"):
        GlmTokenizer(source)


@pytest.mark.parametrize("content", ["", "[]", "{}", "{"])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        GlmTokenizer.load(tmp_path)
