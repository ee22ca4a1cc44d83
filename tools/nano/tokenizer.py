"""Builds glm-nano's tokenizer: byte-level BPE with a small vocabulary.

Separators, single digits and a few fixed phrases (the template's own text, JSON punctuation) are
isolated before BPE, so a word has the same tokens wherever it stands; copying cannot be learnt
otherwise. Any text round-trips: all 256 bytes are in the vocabulary and nothing is normalised.

    python -m tools.nano.tokenizer models/glm-nano
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.nano.tasks import SKILLS, make_episode
from tools.nano.template import ChatTemplate
from tools.nano.words import CJK, CYRILLIC, EMOJI, GREEK, KANA, LATIN, Words, known_words

CONTROL_TOKENS = [
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
]

ORDINARY_TAGS = frozenset(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ]
)
"""Control tokens without the special flag: decoding with skip_special_tokens keeps them."""

PHRASES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "</tools>\n\nFor each function call, output the function name and arguments within the "
    "following XML format:\n",
    "{function-name}", "{arg-key-1}", "{arg-value-1}", "{arg-key-2}", "{arg-value-2}", "...",
    "Reasoning Effort: ",
    '{"name": "', '", "description": "', '", "parameters": {"type": "object", "properties": {',
    ', "required": [',
    '": {"type": "string"}', '": {"type": "integer"}', '{"type": "object"', '"type": "',
    '"]}}', "[]}}", "}}",
    '": "', '", "', '": ', ', "', '{"', '"}', '"]', "</", "->",
    ", ", ": ", "; ", ". ", " - ", "+", "=",
    "What is the value of ", "What is the weather in ", "What is ", "What time is it?", "Repeat: ",
    "Write JSON with ", "Repeat the text.", "Write the object.", "Report the result.",
    "The answer is ",
    " the message: ", "Search for ", "Then call ", ", then ",
)  # fmt: skip

NUM_WORD_MERGES = 250
ROUND_UP = 64


def _alternatives() -> str:
    """Returns the pre-tokenizer's pattern: phrases (longest first), words, digits, others."""
    phrases = "|".join(re.escape(phrase) for phrase in sorted(PHRASES, key=len, reverse=True))
    return rf"{phrases}|[\p{{L}}\p{{M}}]+|\p{{N}}|[^\p{{L}}\p{{M}}\p{{N}}]"


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_alternatives()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_spelling(text: str) -> str:
    """Returns the byte-level spelling of one pre-token."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in level.pre_tokenize_str(text))


def _word_merges() -> list[tuple[str, str]]:
    """Learns merges from the content words of the tasks."""
    words = Words(random.Random(0), "train")
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = _pre_tokenizer()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + NUM_WORD_MERGES, initial_alphabet=alphabet, max_token_length=4,
        show_progress=False,
    )  # fmt: skip
    bare.train_from_iterator((words.word() for _ in range(60_000)), trainer)
    merges = json.loads(bare.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _letter_merges() -> Iterator[tuple[str, str]]:
    """Yields merges that make one token of each frequent letter outside ASCII."""
    seen = set()
    for letter in LATIN + CYRILLIC + GREEK + CJK + KANA + EMOJI:
        spelling = _byte_spelling(letter)
        for end in range(2, len(spelling) + 1):
            merge = (spelling[: end - 1], spelling[end - 1])
            if merge not in seen:
                seen.add(merge)
                yield merge


def _frequent_words(folder: Path) -> list[str]:
    """Returns pre-tokens so frequent in rendered tasks that they deserve a token of their own."""
    template = ChatTemplate(folder)
    rng = random.Random(1)
    counts: Counter[str] = Counter()
    splitter = pre_tokenizers.Split(Regex(_alternatives()), behavior="isolated")
    num_episodes = 3000
    for index in range(num_episodes):
        episode = make_episode([*SKILLS, "small_talk"][index % 7], rng, "train", turns=2, size=6)
        text = template.render(episode.messages, episode.tools, add_generation_prompt=False)
        for token in CONTROL_TOKENS:
            text = text.replace(token, " ")
        counts.update({piece for piece, _ in splitter.pre_tokenize_str(text)})
    often = sorted(word for word, count in counts.items() if count >= num_episodes // 150)
    return [word for word in often if len(word) > 1 and word not in known_words()]


def build(folder: Path) -> Tokenizer:
    """Builds the tokenizer; ``folder`` must hold the chat template."""
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(dict.fromkeys([*_word_merges(), *_letter_merges()]))
    spellings += [left + right for left, right in merges]
    spellings += [_byte_spelling(text) for text in [*PHRASES, *_frequent_words(folder)]]
    vocabulary = {spelling: index for index, spelling in enumerate(dict.fromkeys(spellings))}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token not in ORDINARY_TAGS, normalized=False)
            for token in CONTROL_TOKENS
        ]
    )
    return tokenizer


def padded_vocab_size(tokenizer: Tokenizer) -> int:
    """Returns the size of the embedding table: a multiple of 64, as in the true checkpoint."""
    return -(-tokenizer.get_vocab_size() // ROUND_UP) * ROUND_UP


def tokenizer_config() -> dict[str, Any]:
    """Returns tokenizer_config.json."""
    specials = [token for token in CONTROL_TOKENS if token not in ORDINARY_TAGS]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": specials,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "padding_side": "left",
    }


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json into the folder given."""
    folder = Path(sys.argv[1])
    tokenizer = build(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
