"""config.json: real where kernels fix a size, and the same story told by every field."""

import json
from pathlib import Path

from tokenizers import Tokenizer

from tools.nano.config import generation_config, model_config

FOLDER = Path(__file__).parents[3] / "models" / "glm-nano"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_shipped_configs_are_the_ones_written_here() -> None:
    for name, wanted in (
        ("config.json", model_config(TOKENIZER)),
        ("generation_config.json", generation_config(TOKENIZER)),
    ):
        assert json.loads((FOLDER / name).read_text(encoding="utf-8")) == wanted


def test_sizes_that_kernels_fix_are_real() -> None:
    config = model_config(TOKENIZER)
    fixed = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    assert {key: config[key] for key in fixed} == fixed
    assert config["index_n_heads"] >= 8
    assert config["num_attention_heads"] & (config["num_attention_heads"] - 1) == 0


def test_indexer_types_follow_from_frequency_and_offset_and_the_draft_layer_is_full() -> None:
    config = model_config(TOKENIZER)
    offset, frequency = config["index_skip_topk_offset"], config["index_topk_freq"]
    kinds = [
        "shared" if max(layer - offset + 1, 0) % frequency else "full"
        for layer in range(config["num_hidden_layers"] + 1)
    ]
    assert kinds == [*config["indexer_types"], "full"]


def test_stop_tokens_are_end_of_text_user_and_observation() -> None:
    stops = [TOKENIZER.id_to_token(number) for number in model_config(TOKENIZER)["eos_token_id"]]
    assert stops == ["<|endoftext|>", "<|user|>", "<|observation|>"]
