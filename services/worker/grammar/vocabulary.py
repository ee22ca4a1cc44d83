"""The tokenizer as the grammar engine sees it.

Every added token is a control token here, whether the tokenizer flags it special or not: text of a
grammar never matches one, so a string that spells `<tool_call>` stays text.
"""

from collections.abc import Mapping, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from shared.glm.tokenizer import GlmTokenizer
from shared.glm.tokens import ControlTokens

# Bounds of one grammar. Fuel is deterministic work: the lexer burns 14,000 units in a millisecond
# and the parser makes 20,000 items, so a mask that takes 10 ms is refused on any machine. A state
# of the lexer takes up to 2 KiB.
_INITIAL_LEXER_FUEL = 1_000_000
_STEP_LEXER_FUEL = 100_000
_STEP_MAX_ITEMS = 25_000
_MAX_LEXER_STATES = 150_000
_MAX_GRAMMAR_SIZE = 200_000


class EngineVocabulary:
    """A tokenizer, ready for the engine. Usable from several threads."""

    def __init__(self, tokenizer: GlmTokenizer) -> None:
        """Takes about a second for 150,000 tokens."""
        vocabulary = tokenizer.vocabulary
        self.size = len(vocabulary)
        self._tokenizer = tokenizer
        self._engine = LLTokenizer(TokenizerWrapper(_Source(tokenizer)), n_vocab=self.size)
        # Here, since it takes as long as a step: the first row that needs it would hold up all.
        self.blanks: Mapping[int, int] = {
            token: len(text) for token, text in enumerate(vocabulary.token_bytes) if text.isspace()
        }
        """Tokens that are nothing but blanks and line breaks, with their number of bytes."""

    @property
    def control(self) -> ControlTokens:
        """Ids of the control tokens."""
        return self._tokenizer.vocabulary.control

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of all added tokens."""
        return self._tokenizer.vocabulary.added_ids

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return -(-self.size // 32)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a grammar; one that is wrong is in its error state."""
        return LLMatcher(self._engine, grammar, log_level=0, limits=_limits())

    def split_control(self, text: str) -> list[str | int]:
        """A text cut into ordinary runs and the ids of the control tokens that it spells."""
        pieces = self._tokenizer.split_control(text)
        added = self._tokenizer.added_tokens
        cut = [added[piece] if place % 2 else piece for place, piece in enumerate(pieces)]
        return [piece for piece in cut if piece != ""]


class _Source:
    """What the engine asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: GlmTokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self.eos_token_id = vocabulary.control.end_of_text
        self.tokens: Sequence[bytes] = list(vocabulary.token_bytes)
        self.special_token_ids = sorted(vocabulary.added_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Ids of a text that a grammar forces: those that the model has learned for it."""
        if isinstance(text, bytes):
            raise TypeError("takes text")  # how the engine finds out
        return self._tokenizer.encode(text, allow_control=False)


def _limits() -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_LEXER_FUEL,
        step_lexer_fuel=_STEP_LEXER_FUEL,
        step_max_items=_STEP_MAX_ITEMS,
        max_lexer_states=_MAX_LEXER_STATES,
        max_grammar_size=_MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
