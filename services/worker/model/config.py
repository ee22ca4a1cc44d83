"""The checkpoint's config.json as one typed, checked value.

Every field is explicit: class defaults of other libraries differ between GLM releases, so nothing
here falls back to them. What this version cannot serve is refused here, by field and value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import ConfigError

_T = TypeVar("_T")

BLOCK_SIZE = 128
"""KV slots per block; the sparse kernels of the NPU are built for it."""

MAX_SPECULATIVE_TOKENS = 15
"""A row computes one token more than it has drafts, and 16 are what an NPU's attention takes."""

FULL = "full"
SHARED = "shared"
DENSE = "dense"
SPARSE = "sparse"

# Sizes that the NPU kernels fix (npu_sparse_flash_attention, npu_lightning_indexer,
# npu_interleave_rope). The CPU kernels are specialised on the same numbers.
_KERNEL_SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
_HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_INDEX_HEADS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and choices of one ``glm_moe_dsa`` checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    latent_norm_eps: float
    """Epsilon of q_a_layernorm and kv_a_layernorm: transformers fixes 1e-6, vLLM-Ascend uses
    ``rms_norm_eps``. The json key ``latent_norm_eps`` decides; the default is ``rms_norm_eps``."""
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Check every bound; the first violation names its field and value."""
        for name in _POSITIVE:
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name, most in _MOST.items():
            _require_at_most(most, name, getattr(self, name))
        _require(
            self.num_nextn_predict_layers in {0, 1},
            "num_nextn_predict_layers",
            self.num_nextn_predict_layers,
            "must be 0 or 1",
        )
        for name, size in _KERNEL_SIZES.items():
            _require(getattr(self, name) == size, name, getattr(self, name), f"must be {size}")
        _require(
            self.num_attention_heads in _HEAD_COUNTS,
            "num_attention_heads",
            self.num_attention_heads,
            f"must be one of {_HEAD_COUNTS}",
        )
        _require(
            self.index_n_heads <= _MAX_INDEX_HEADS,
            "index_n_heads",
            self.index_n_heads,
            f"must be at most {_MAX_INDEX_HEADS}",
        )
        self._check_experts()
        self._check_layers()

    def _check_experts(self) -> None:
        group_size, rest = divmod(self.n_routed_experts, self.n_group)
        _require(rest == 0, "n_group", self.n_group, "must divide n_routed_experts")
        # The router ranks a group by the sum of its two best experts.
        is_ranked = self.n_group == 1 or group_size > 1
        _require(is_ranked, "n_group", self.n_group, "a group needs two experts")
        is_within = self.topk_group <= self.n_group
        _require(is_within, "topk_group", self.topk_group, "must be at most n_group")
        _require(
            self.num_experts_per_tok <= self.topk_group * group_size,
            "num_experts_per_tok",
            self.num_experts_per_tok,
            "must fit in the chosen groups",
        )

    def _check_layers(self) -> None:
        kinds = {"indexer_types": {FULL, SHARED}, "mlp_layer_types": {DENSE, SPARSE}}
        for name, allowed in kinds.items():
            entries = getattr(self, name)
            _require(
                len(entries) == self.num_hidden_layers,
                name,
                f"{len(entries)} entries",
                "must have one entry per layer",
            )
            for index, kind in enumerate(entries):
                _require(kind in allowed, f"{name}[{index}]", kind, f"must be in {sorted(allowed)}")
        _require(
            self.indexer_types[0] == FULL,
            "indexer_types[0]",
            self.indexer_types[0],
            "the first layer has no earlier selection to share",
        )

    @property
    def qk_head_dim(self) -> int:
        """Query and key head size, with and without position together."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Attention scale; plain RoPE has no extra factor."""
        return 1.0 / math.sqrt(self.qk_head_dim)

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects positions itself; an MTP layer always does."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == FULL

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has routed experts; an MTP layer always does."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == SPARSE

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read and check ``config.json`` of a checkpoint directory."""
        file = Path(path) / "config.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: must hold one JSON object")
        try:
            return cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build from the parsed config.json."""
        _refuse_unserved(values)
        num_layers = _integer(values, "num_hidden_layers")
        # Before a list of that many layers is made.
        _require_at_most(_MOST["num_hidden_layers"], "num_hidden_layers", num_layers)
        rms_norm_eps = _number(values, "rms_norm_eps")
        integers = {name: _integer(values, name) for name in _INTEGERS}
        return cls(
            **integers,
            num_nextn_predict_layers=_integer(values, "num_nextn_predict_layers", 0),
            n_group=_integer(values, "n_group", 1),
            topk_group=_integer(values, "topk_group", 1),
            routed_scaling_factor=_number(values, "routed_scaling_factor"),
            indexer_types=_indexer_types(values, num_layers),
            mlp_layer_types=_mlp_layer_types(values, num_layers),
            rope_theta=_rope_theta(values),
            rms_norm_eps=rms_norm_eps,
            latent_norm_eps=_number(values, "latent_norm_eps", rms_norm_eps),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=_token_ids(values, "eos_token_id"),
            dtype=_string(values, "dtype", _string(values, "torch_dtype", "bfloat16")),
        )


_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
)
_POSITIVE = (
    *_INTEGERS,
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "rope_theta",
    "rms_norm_eps",
    "latent_norm_eps",
)

# Where a number can only be a mistake: well above every model of the family, and small enough that
# what is built without storage to compare it with the weights stays small.
_MOST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "q_lora_rank": 1 << 17,
    "qk_nope_head_dim": 1 << 12,
    "v_head_dim": 1 << 12,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 8,
    "index_topk": 1 << 16,
    # Angles are computed from positions in float32, which is exact up to here.
    "max_position_embeddings": 1 << 24,
}

# What the decoder computes; any other value would silently change the result.
_ONLY_VALUES: Mapping[str, object] = {
    "model_type": "glm_moe_dsa",
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "moe_layer_freq": 1,
}


def _require(holds: bool, field: str, value: object, bound: str) -> None:
    if not holds:
        raise ConfigError(f"config.json: {field}={value!r}: {bound}")


def _require_at_most(most: int, field: str, value: int) -> None:
    _require(value <= most, field, value, f"must be at most {most}")


def _refuse_unserved(values: Mapping[str, Any]) -> None:
    _require("model_type" in values, "model_type", None, "is missing")
    for field, only in _ONLY_VALUES.items():
        if field in values:
            _require(values[field] == only, field, values[field], f"only {only!r} is supported")
    _refuse_foreign_quantization(values.get("quantization_config"))
    heads = values.get("num_attention_heads")
    kv_heads = values.get("num_key_value_heads", heads)
    # Every head expands its own key from the latent; there is nothing to group.
    _require(kv_heads == heads, "num_key_value_heads", kv_heads, f"must be {heads}")


def _refuse_foreign_quantization(value: object) -> None:
    """Quantized weights are told by a file of their own in the one format that is served."""
    if value is None:
        return
    method = value.get("quant_method") if isinstance(value, dict) else value
    raise ConfigError(
        f"config.json: quantization_config: checkpoints of quant_method {method!r} are not served, "
        "only those in ModelSlim's format, which have a quant_model_description.json instead"
    )


def _typed(
    values: Mapping[str, Any],
    field: str,
    default: _T | None,
    convert: Callable[[object], _T | None],
) -> _T:
    value = values.get(field)
    if value is None:
        if default is None:
            raise ConfigError(f"config.json: {field} is missing")
        return default
    converted = convert(value)
    if converted is None:
        raise ConfigError(f"config.json: {field}={value!r}: has the wrong type")
    return converted


def _integer(values: Mapping[str, Any], field: str, default: int | None = None) -> int:
    def convert(value: object) -> int | None:
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return _typed(values, field, default, convert)


def _number(values: Mapping[str, Any], field: str, default: float | None = None) -> float:
    def convert(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if math.isfinite(value) else None

    return _typed(values, field, default, convert)


def _string(values: Mapping[str, Any], field: str, default: str) -> str:
    return _typed(values, field, default, lambda value: value if isinstance(value, str) else None)


def _token_ids(values: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = values.get(field)
    ids: Sequence[object] = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(f"config.json: {field}={value!r}: must be one token id or a list")
    return tuple(token for token in ids if isinstance(token, int))


def _rope_theta(values: Mapping[str, Any]) -> float:
    parameters = values.get("rope_parameters")
    if parameters is None:
        return _number(values, "rope_theta")
    if not isinstance(parameters, dict):
        raise ConfigError(f"config.json: rope_parameters={parameters!r}: must be an object")
    kind = parameters.get("rope_type", "default")
    _require(kind == "default", "rope_parameters.rope_type", kind, "only 'default' is supported")
    return _number(parameters, "rope_theta")


def _indexer_types(values: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """Layer kinds: the list itself, else the pattern, else the frequency rule."""
    listed = values.get("indexer_types")
    if listed is not None:
        return _strings(listed, "indexer_types")
    pattern = values.get("index_topk_pattern")
    if isinstance(pattern, str):
        kinds = {"F": FULL, "S": SHARED}
        for character in pattern:
            _require(character in kinds, "index_topk_pattern", pattern, "may hold only F and S")
        return tuple(kinds[character] for character in pattern)
    if pattern is not None:
        return _strings(pattern, "index_topk_pattern")
    frequency = max(_integer(values, "index_topk_freq", 1), 1)
    offset = _integer(values, "index_skip_topk_offset", 2)
    return tuple(
        FULL if max(layer - offset + 1, 0) % frequency == 0 else SHARED
        for layer in range(num_layers)
    )


def _mlp_layer_types(values: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    listed = values.get("mlp_layer_types")
    if listed is not None:
        return _strings(listed, "mlp_layer_types")
    num_dense = min(_integer(values, "first_k_dense_replace"), num_layers)
    return (DENSE,) * num_dense + (SPARSE,) * (num_layers - num_dense)


def _strings(value: object, field: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ConfigError(f"config.json: {field}={value!r}: must be a list of strings")
    return tuple(entry.lower() for entry in value)
