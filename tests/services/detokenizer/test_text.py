import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.text import IncrementalDecoder
from shared.glm.tokenizer import Vocabulary
from tests.services.detokenizer.words import VOCABULARY, ids


def pieces(tokens: list[int]) -> list[str]:
    decoder = IncrementalDecoder(VOCABULARY)
    return [*map(decoder.push, tokens), decoder.flush()]


@given(st.lists(st.integers(0, len(VOCABULARY) + 10)))
def test_joined_pieces_equal_the_decoding_of_the_whole(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == VOCABULARY.decode(tokens)


def test_a_character_in_bytes_appears_with_its_last_byte() -> None:
    assert pieces(list("😀".encode())) == ["", "", "", "😀", ""]


def test_invalid_bytes_are_told_from_incomplete_ones_at_once() -> None:
    assert pieces([0xFF, 0x61]) == ["�", "a", ""]
    assert pieces([0xF0, 0x61]) == ["", "�a", ""]


def test_an_incomplete_tail_is_flushed_as_one_replacement_character() -> None:
    assert pieces(list("a😀".encode())[:-1])[-1] == "�"


def test_a_genuine_replacement_character_passes() -> None:
    assert "".join(pieces(list("a�b".encode()))) == "a�b"


@pytest.mark.parametrize("lead", [[], [0xE6]])
def test_an_id_without_a_token_adds_nothing(vocabulary: Vocabulary, lead: list[int]) -> None:
    decoder = IncrementalDecoder(vocabulary)
    for token in lead:
        decoder.push(token)
    assert decoder.push(10**6) == ""
    assert decoder.pending == bytes(lead)


def test_bytes_of_a_word_continue_a_character() -> None:
    decoder = IncrementalDecoder(VOCABULARY)
    assert decoder.push(0xC3) == ""
    assert decoder.push(ids(" the")[0]) == "� the"
