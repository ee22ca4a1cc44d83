"""Tiny GLM models: a transformers oracle and the same weights as a checkpoint of ours."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker import ops

TINY: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 16,
    "indexer_types": ["full", "shared", "full", "shared"],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    # transformers builds the latent norms with its class default
    "latent_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class OracleCheckpoint:
    """A transformers model and the directory that holds its weights in the release's layout.

    `mtp` is a model of one layer and a norm: what the MTP layer does to its input.
    """

    model: Any
    path: Path
    values: dict[str, Any]
    mtp: Any = None


@pytest.fixture(scope="session", autouse=True)
def operators() -> None:
    ops.register()


@pytest.fixture
def tiny_values() -> dict[str, Any]:
    return dict(TINY)


@pytest.fixture(scope="session")
def make_checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., OracleCheckpoint]:
    """Build a random oracle from `TINY` with changes, and write it as a checkpoint."""

    def make(*, seed: int = 0, **changes: object) -> OracleCheckpoint:
        values = TINY | changes
        values["num_key_value_heads"] = values["num_attention_heads"]
        model, mtp = _oracle(values, seed), None
        tensors = release_tensors(model)
        if values["num_nextn_predict_layers"]:
            one = {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 0}
            mtp = _oracle(values | one, seed + 1)
            tensors |= _mtp_tensors(mtp, values, seed)
        path = tmp_path_factory.mktemp("checkpoint")
        write_checkpoint(path, values, tensors)
        return OracleCheckpoint(model=model, path=path, values=values, mtp=mtp)

    return make


def _oracle(values: dict[str, Any], seed: int) -> Any:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    config = GlmMoeDsaConfig(**values, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    model = GlmMoeDsaForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_random_weight(name, tensor, generator))
    return model


def _random_weight(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Weights that keep activations near unit size, so that every part moves the logits."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "layernorm.weight" in name or "norm.weight" in name:
        return 1.0 + 0.2 * noise
    if tensor.dim() == 1:
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    return noise / math.sqrt(tensor.shape[-1])


def release_tensors(model: Any) -> dict[str, Tensor]:
    """The oracle's weights under the names of the release: one tensor per expert matrix."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, experts, kind = name.partition("mlp.experts.")
        if not experts:
            tensors[name] = tensor.clone()
            continue
        for expert, matrix in enumerate(tensor):
            base = f"{prefix}{experts}{expert}."
            if kind == "gate_up_proj":
                gate, up = matrix.chunk(2)
                tensors[f"{base}gate_proj.weight"] = gate.clone()
                tensors[f"{base}up_proj.weight"] = up.clone()
            else:
                tensors[f"{base}down_proj.weight"] = matrix.clone()
    return tensors


def _mtp_tensors(mtp: Any, values: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The one layer and its norm under the names of the MTP layer, with the joints around it."""
    prefix = f"model.layers.{values['num_hidden_layers']}."
    tensors = {
        name.replace("model.layers.0.", prefix): tensor
        for name, tensor in release_tensors(mtp).items()
        if name.startswith("model.layers.")
    }
    tensors[f"{prefix}shared_head.norm.weight"] = mtp.model.norm.weight.detach().clone()
    hidden = values["hidden_size"]
    generator = torch.Generator().manual_seed(seed + 2)
    shapes = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    for name, shape in shapes.items():
        kind = name.replace("norm", "layernorm") + ".weight"
        weight = _random_weight(kind, torch.empty(shape), generator)
        tensors[f"{prefix}{name}.weight"] = weight
    return tensors


def write_checkpoint(path: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (path / "config.json").write_text(json.dumps(values))
    save_file(tensors, str(path / "model.safetensors"))
