"""glm-nano's sizes: the config.json of the checkpoint and what follows from it.

What a kernel fixes on an NPU is true to GLM-5.2 (latent 512, rope 64, indexer heads of 128, head
counts that are powers of two); everything else is small.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tools.nano.tokenizer import padded_vocab_size

STOP_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 384,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_dtype": "float32",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    "v_head_dim": 64,
    "head_dim": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 128,
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "index_topk_pattern": None,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
    "index_share_for_mtp_iteration": True,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "latent_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
}


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns config.json for a tokenizer."""
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": padded_vocab_size(tokenizer),
        "bos_token_id": None,
        "eos_token_id": [tokenizer.token_to_id(token) for token in STOP_TOKENS],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        **SIZES,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns generation_config.json: GLM's sampling defaults and stop tokens."""
    return {
        "do_sample": True,
        "eos_token_id": [tokenizer.token_to_id(token) for token in STOP_TOKENS],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "temperature": 1.0,
        "top_p": 0.95,
    }


def write_configs(folder: Path, tokenizer: Tokenizer) -> None:
    """Writes config.json and generation_config.json."""
    for name, config in (
        ("config.json", model_config(tokenizer)),
        ("generation_config.json", generation_config(tokenizer)),
    ):
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
