"""What a token of GLM-5.2 costs: weights, operations and cache bytes from the published sizes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CONFIG: Final = Path(__file__).resolve().parents[2] / "models" / "glm-5.2" / "config.json"

# Bytes of a weight outside of routed experts and inside; bytes of a latent and an index key value.
SCHEMES: Final[dict[str, tuple[float, float, float]]] = {
    "bf16": (2.0, 2.0, 2.0),
    "w8a8": (1.0, 1.0, 2.0),
    "w8a8c8": (1.0, 1.0, 1.0),
    "w4a8": (1.0, 0.5, 2.0),
    "w4a8c8": (1.0, 0.5, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Counts of weights, and what attention reads."""

    num_layers: int
    num_sparse_layers: int
    num_index_layers: int
    hidden: int
    num_experts: int
    num_active_experts: int
    dense_weights: int
    """Outside of routed experts: every token uses all of them."""
    expert_weights: int
    """Of one expert of one layer."""
    head_weights: int
    latent_values: int
    index_values: int
    num_heads: int
    num_index_heads: int
    topk: int

    @property
    def num_weights(self) -> int:
        """All of them."""
        return self.dense_weights + self.num_sparse_layers * self.num_experts * self.expert_weights

    @property
    def routed_weights(self) -> int:
        """Those of experts that a token is routed to, of all layers."""
        return self.num_sparse_layers * self.num_active_experts * self.expert_weights

    @property
    def cache_values(self) -> int:
        """Values of the caches per token; docs/sizing.md has the bytes."""
        return self.num_layers * self.latent_values + self.num_index_layers * self.index_values

    def attention_operations(self, context: float) -> float:
        """Operations of one token that attends to a context: scores of the indexer, attention."""
        index = 2 * self.num_index_heads * self.index_values * context * self.num_index_layers
        seen = min(context, self.topk)
        attention = 4 * self.num_heads * self.latent_values * seen * self.num_layers
        return index + attention

    def attention_values(self, context: float) -> float:
        """Values that a decoding token reads of the caches."""
        seen = min(context, self.topk)
        return (
            self.num_index_layers * self.index_values * context
            + self.num_layers * self.latent_values * seen
        )


def read_sizes(path: Path = CONFIG) -> ModelSizes:
    """The sizes of a checkpoint's config.json."""
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kinds, indexers = config["mlp_layer_types"], config["indexer_types"]
    latent = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    expert = 3 * hidden * config["moe_intermediate_size"]
    num_sparse, num_index = kinds.count("sparse"), indexers.count("full")
    dense = len(kinds) * _attention_weights(config) + num_index * _indexer_weights(config)
    dense += kinds.count("dense") * 3 * hidden * config["intermediate_size"]
    dense += num_sparse * (
        config["n_shared_experts"] * expert + hidden * config["n_routed_experts"]
    )
    dense += 2 * hidden * config["vocab_size"]  # embedding and head
    return ModelSizes(
        num_layers=len(kinds),
        num_sparse_layers=num_sparse,
        num_index_layers=num_index,
        hidden=hidden,
        num_experts=config["n_routed_experts"],
        num_active_experts=config["num_experts_per_tok"],
        dense_weights=dense,
        expert_weights=expert,
        head_weights=hidden * config["vocab_size"],
        latent_values=latent,
        index_values=config["index_head_dim"],
        num_heads=heads,
        num_index_heads=config["index_n_heads"],
        topk=config["index_topk"],
    )


def _attention_weights(config: dict[str, Any]) -> int:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    queries = hidden * q_rank + q_rank * heads * config["qk_head_dim"]
    keys = hidden * (kv_rank + config["qk_rope_head_dim"])
    keys += kv_rank * heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    return int(queries + keys + heads * config["v_head_dim"] * hidden)


def _indexer_weights(config: dict[str, Any]) -> int:
    index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
    queries = config["q_lora_rank"] * index_heads * index_dim
    return int(queries + config["hidden_size"] * (index_dim + index_heads))
