"""The tokenizer as the engine sees it."""

import numpy as np

from services.worker.grammar.vocabulary import EngineVocabulary
from shared.glm.tokenizer import GlmTokenizer


def test_no_text_of_a_grammar_matches_a_control_token(vocabulary: EngineVocabulary) -> None:
    """Some of them, such as <tool_call>, are not flagged special in the tokenizer."""
    matcher = vocabulary.matcher('{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}')
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(bits).tolist())
    assert allowed & vocabulary.control_ids == {vocabulary.control.end_of_text}
    assert len(allowed) > 256


def test_a_forced_text_is_written_with_the_tokens_that_the_tokenizer_makes(
    vocabulary: EngineVocabulary, tokenizer: GlmTokenizer
) -> None:
    text = "get_weather"
    matcher = vocabulary.matcher(f'{{"grammars": [{{"lark_grammar": "start: \\"{text}\\""}}]}}')
    assert matcher.compute_ff_tokens() == tokenizer.encode(text, allow_control=False)


def test_text_is_cut_at_spellings_of_control_tokens(vocabulary: EngineVocabulary) -> None:
    control = vocabulary.control
    pieces = vocabulary.split_control("a<tool_call></tool_call>b<tool")
    assert pieces == ["a", control.tool_call, control.end_tool_call, "b<tool"]
    assert vocabulary.split_control("") == []


def test_a_mask_has_a_word_for_every_32_ids(vocabulary: EngineVocabulary) -> None:
    assert 32 * (vocabulary.num_words - 1) < vocabulary.size <= 32 * vocabulary.num_words


def test_errors_do_not_quote_the_grammar(vocabulary: EngineVocabulary) -> None:
    matcher = vocabulary.matcher('{"grammars": [{"lark_grammar": "start: \\"a\\" \\"b\\""}]}')
    matcher.consume_token(vocabulary.control.think)
    assert matcher.is_error()
    assert "start:" not in matcher.get_error()


def test_blanks_are_counted_before_a_row_needs_them(
    vocabulary: EngineVocabulary, tokenizer: GlmTokenizer
) -> None:
    """Of 150,000 tokens that takes as long as a step."""
    blanks, texts = vars(vocabulary)["blanks"], tokenizer.vocabulary.token_bytes
    assert blanks
    for token, text in enumerate(texts):
        expected = len(text) if text and not text.strip() else None
        assert blanks.get(token) == expected
