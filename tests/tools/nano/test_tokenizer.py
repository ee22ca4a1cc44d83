"""The shipped tokenizer: any text comes back, control tokens are one id, words never vary."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tools.nano.tokenizer import CONTROL_TOKENS, ORDINARY_TAGS, build, padded_vocab_size

FOLDER = Path(__file__).parents[3] / "models" / "glm-nano"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back_unchanged(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("spelling", CONTROL_TOKENS)
def test_control_token_is_one_id_with_its_flag(tokenizer: Tokenizer, spelling: str) -> None:
    number = tokenizer.token_to_id(spelling)
    assert tokenizer.encode(f"a{spelling}b").ids[1:-1] == [number]
    assert tokenizer.get_added_tokens_decoder()[number].special == (spelling not in ORDINARY_TAGS)


def test_there_are_36_control_tokens_at_the_end_of_the_vocabulary(tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    assert [tokenizer.token_to_id(t) for t in CONTROL_TOKENS] == list(range(size - 36, size))
    assert padded_vocab_size(tokenizer) % 64 == 0


@given(word=st.from_regex(r"[A-Za-z]{1,12}", fullmatch=True))
@settings(deadline=None, max_examples=50)
def test_word_has_the_same_tokens_wherever_it_stands(word: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    alone = tokenizer.encode(word).ids
    for before, after in ((" ", "."), ("\n", ": "), ('"', '"'), ("<arg_value>", "</arg_value>")):
        ids = tokenizer.encode(before + word + after).ids
        assert ids[1 : 1 + len(alone)] == alone


def test_tags_stay_and_roles_go_when_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|user|>Hi<think>x</think>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hi<think>x</think>"


def test_building_again_gives_the_shipped_tokenizer(tokenizer: Tokenizer) -> None:
    assert build(FOLDER).to_str() == tokenizer.to_str()
