"""Models and steps that the contract test drives through torch_npu's shape functions."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from services.worker.kv_cache import KVCaches, allocate
from services.worker.model.config import BLOCK_SIZE, ModelConfig
from services.worker.model.metadata import StepMetadata
from services.worker.model.spec import ModelSpec
from tools.npu_contract.environment import ROOT

_CUT_LAYERS = 8
"""Of 78: dense and full, sparse and shared, sparse and full are all among them."""

_BENCHMARK: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 2112,
        "hidden_size": 192,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "index_n_heads": 8,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 8192,
    }
)
"""Sizes of the serving race (`benchmarks/random_model.py`) that are not GLM-5.2's."""


_TWO_LAYERS: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 2e-5,
        "latent_norm_eps": 3e-6,
        "index_topk": 1024,
        "n_group": 8,
        "topk_group": 4,
    }
)
"""GLM-5.2's sizes in the fewest layers that make every call, and no number like a default."""


def _read_config(model: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ROOT / "models" / model / "config.json").read_text())
    return values


def cut_glm_5_2() -> dict[str, Any]:
    """The published sizes with fewer layers; their kinds follow from the frequencies."""
    values = _read_config("glm-5.2") | {"num_hidden_layers": _CUT_LAYERS}
    for name in ("indexer_types", "mlp_layer_types", "num_key_value_heads"):
        del values[name]
    return values


@functools.cache
def model_configs() -> Mapping[str, ModelConfig]:
    """Every model by its name."""
    cut = cut_glm_5_2()
    cases: dict[str, Mapping[str, Any]] = {
        "glm-nano": _read_config("glm-nano"),
        "benchmark": {**cut, **_BENCHMARK},
        "glm-5.2": cut,
        "two layers": {**cut, **_TWO_LAYERS},
    }
    configs = {name: ModelConfig.from_dict(values) for name, values in cases.items()}
    return MappingProxyType(configs)


@dataclass(frozen=True, slots=True)
class StepCase:
    """New tokens and KV length after the step, per sequence; KV length 0 is padding."""

    query_lens: Sequence[int]
    seq_lens: Sequence[int]


STEPS: Mapping[str, StepCase] = MappingProxyType(
    {
        "prefill": StepCase([5, 130], [5, 130]),
        "chunk of a long prefill": StepCase([256], [3000]),
        "decode": StepCase([1, 1, 1, 1], [1, 129, 2049, 4000]),
        "mixed": StepCase([1, 1, 130, 7], [400, 2, 130, 2500]),
        "mixed with padding": StepCase([1, 33, 6], [77, 300, 0]),
    }
)


def make_step(case: StepCase, device: str) -> tuple[Tensor, StepMetadata]:
    """Token ids and metadata of a step over consecutive blocks, block 0 left out."""
    blocks = [-(-length // BLOCK_SIZE) for length in case.seq_lens]
    table = torch.zeros((len(blocks), max(*blocks, 1)), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    first = 1
    for row, (count, new, length) in enumerate(
        zip(blocks, case.query_lens, case.seq_lens, strict=True)
    ):
        table[row, :count] = torch.arange(first, first + count)
        for position in range(max(length - new, 0), max(length - new, 0) + new):
            positions.append(position)
            slots.append(first * BLOCK_SIZE + position if length else position % BLOCK_SIZE)
        first += count
    step = StepMetadata(
        num_tokens=len(positions),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int32, device=device),
        cum_query_lens=torch.tensor(case.query_lens, device=device).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
    )
    return torch.zeros(len(positions), dtype=torch.int64, device=device), step


def make_caches(spec: ModelSpec, case: StepCase) -> KVCaches:
    """Caches with room for the step."""
    num_blocks = 2 + sum(-(-length // BLOCK_SIZE) for length in case.seq_lens)
    return allocate(spec, num_blocks)
