"""Random words and numbers for the glm-nano tasks; training never sees the eval words.

A word belongs to the eval split when the hash of its spelling says so; nothing else decides. The
module imports neither torch nor tokenizers: the evaluation client uses it too.
"""

import random
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Split = Literal["train", "eval"]

EVAL_SHARE = 8
"""One word in this many is kept for evaluation."""

CONSONANTS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gr",
    "pl",
    "sh",
    "st",
    "th",
    "tr",
]
VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ee", "io", "ou"]
ENDINGS = ["", "", "", "n", "r", "s", "l", "t", "m", "x"]

LATIN = "áàâäãåæçéèêëíìîïñóòôöõøúùûüýßœčšžłęąřů"
CYRILLIC = "абвгдежзийклмнопрстуфхцчшщыьэюя"
GREEK = "αβγδεζηθικλμνξοπρστυφχψως"
CJK = "日月山水火木金土人大小中上下天雨花海空学生東京北南西風雪星心手目口"
KANA = "あいうえおかきくけこさしすせそたちつてとなにのはまみやらりるれん"
EMOJI = "😀😂😊😍🎉🌍🌙🔥🐱🐶🍎🚀⭐🎵🌈🌸"
SCRIPTS = (LATIN, CYRILLIC, GREEK, CJK, KANA, EMOJI)
RARE_RANGES = (
    (0x0100, 0x017F),
    (0x0410, 0x044F),
    (0x05D0, 0x05EA),
    (0x0E01, 0x0E2E),
    (0x4E00, 0x9FA5),
)


def split_of(text: str) -> Split:
    """Says which split a word, number or pair belongs to, by its spelling alone."""
    return "eval" if zlib.crc32(text.encode()) % EVAL_SHARE == 0 else "train"


@cache
def known_words() -> tuple[str, ...]:
    """Returns the bundled list of ordinary words, names and places."""
    text = Path(__file__).with_name("words.txt").read_text(encoding="utf-8")
    return tuple(sorted(set(text.split())))


@dataclass(frozen=True, slots=True)
class Words:
    """Draws words and numbers of one split."""

    rng: random.Random
    split: Split

    def _draw_spelling(self) -> str:
        kind = self.rng.random()
        if kind < 0.35:
            return self.rng.choice(known_words())
        if kind < 0.95:
            parts = [
                self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS)
                for _ in range(self.rng.choice((1, 2, 2, 2, 3)))
            ]
            word = "".join(parts) + self.rng.choice(ENDINGS)
            return word.capitalize() if self.rng.random() < 0.15 else word
        length = self.rng.randint(2, 6)
        return "".join(self.rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))

    def word(self) -> str:
        """Draws one word of this split."""
        while True:
            spelling = self._draw_spelling()
            if split_of(spelling) == self.split:
                return spelling

    def distinct(self, count: int) -> list[str]:
        """Draws ``count`` different words, also different when letter case is ignored."""
        seen: dict[str, str] = {}
        while len(seen) < count:
            word = self.word()
            seen.setdefault(word.lower(), word)
        return list(seen.values())

    def number(self, low: int = 0, high: int = 9999) -> int:
        """Draws a number of this split, small ones as often as large ones."""
        while True:
            value = self.rng.randint(low, min(high, 10 ** self.rng.randint(1, 4)))
            if high - low < 100 or split_of(str(value)) == self.split:
                return value

    def phrase(self, low: int, high: int) -> str:
        """Draws ``low`` to ``high`` words joined by spaces."""
        return " ".join(self.word() for _ in range(self.rng.randint(low, high)))

    def foreign(self) -> str:
        """Draws a word in another script."""
        while True:
            if self.rng.random() < 0.15:
                low, high = self.rng.choice(RARE_RANGES)
                size = self.rng.randint(1, 3)
                text = "".join(chr(self.rng.randint(low, high)) for _ in range(size))
            else:
                script = self.rng.choice(SCRIPTS)
                size = self.rng.randint(1, 3 if script in (CJK, KANA, EMOJI) else 6)
                text = "".join(self.rng.choice(script) for _ in range(size))
                if script is LATIN:
                    text = self.rng.choice("abdeklmorst") + text[:2] + self.rng.choice("aeiort")
            if len(text) < 3 or split_of(text) == self.split:
                return text
