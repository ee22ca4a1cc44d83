"""Random words: the split is a property of the spelling, so the two never meet."""

import random

import pytest

from tools.nano.words import EVAL_SHARE, Split, Words, known_words, split_of


@pytest.mark.parametrize("split", ["train", "eval"])
def test_drawn_words_and_numbers_belong_to_their_split(split: Split) -> None:
    words = Words(random.Random(1), split)
    for _ in range(500):
        assert split_of(words.word()) == split
        assert split_of(str(words.number())) == split
        foreign = words.foreign()
        assert len(foreign) < 3 or split_of(foreign) == split


def test_a_fair_share_of_ordinary_words_is_kept_for_evaluation() -> None:
    kept = sum(split_of(word) == "eval" for word in known_words())
    assert 0.5 < kept * EVAL_SHARE / len(known_words()) < 1.5


def test_distinct_words_differ_in_any_letter_case() -> None:
    found = Words(random.Random(2), "train").distinct(300)
    assert len({word.lower() for word in found}) == 300
