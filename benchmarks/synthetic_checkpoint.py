"""A checkpoint of any size with the true matrix sizes of GLM-5.2, written without holding it.

The weights are one block of random numbers over and over: loading does not care, and a disk or a
page cache that saw a pattern in it would have to look at 4 MiB at once.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec

_ITEM_BYTES = 2
_EXPERT_BYTES = 3 * 2048 * 6144 * _ITEM_BYTES
_REST_BYTES = 700 << 20  # two layers without their experts
_BLOCK_ITEMS = 2 << 20
_PREFIX_BYTES = 8


def full_width_config(num_experts: int, **changes: object) -> dict[str, Any]:
    """Values of config.json: two layers of the true width, the second with experts."""
    return {
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 4096,
        "hidden_size": 6144,
        "intermediate_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "n_routed_experts": num_experts,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "indexer_types": ["full", "shared"],
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": [1],
    } | changes


def num_experts_for(num_bytes: int) -> int:
    """Experts that make a checkpoint of about this size."""
    return max(4, (num_bytes - _REST_BYTES) // _EXPERT_BYTES)


def write_checkpoint(folder: Path, values: dict[str, Any], num_files: int = 1) -> int:
    """Write config.json, `num_files` weight files and their index; returns bytes of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_dict(values)
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"))
    slots = list(Decoder.build(spec).slots())
    share = -(-len(slots) // num_files)
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = slots[number * share : (number + 1) * share]
        _write_file(folder / name, part)
        weight_map |= {slot.name: name for slot in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(_num_items(slot) for slot in slots) * _ITEM_BYTES


def _write_file(file: Path, slots: Sequence[WeightSlot]) -> None:
    header, end = {}, 0
    for slot in slots:
        start, end = end, end + _num_items(slot) * _ITEM_BYTES
        shape = list(slot.shape)
        header[slot.name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + _PREFIX_BYTES) % _PREFIX_BYTES)
    # Numbers between -0.03 and 0.03.
    random = np.random.default_rng(0)
    values = random.uniform(-0.03, 0.03, _BLOCK_ITEMS).astype(np.float32)
    block = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        while end > 0:
            stream.write(block[:end])
            end -= len(block)


def _num_items(slot: WeightSlot) -> int:
    return int(np.prod(slot.shape, dtype=np.int64))
