"""What options have to fit: sizes of the checkpoint, and how it is quantized."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

DESCRIPTION: Final = "quant_model_description.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes from config.json; None where the file does not say, or cannot be read."""

    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    num_nextn_predict_layers: int | None = None
    n_routed_experts: int | None = None
    index_topk: int | None = None
    kv_lora_rank: int | None = None
    hidden_size: int | None = None
    moe_intermediate_size: int | None = None
    max_position_embeddings: int | None = None
    quant_types: frozenset[str] = frozenset()
    has_quant_description: bool = False
    is_known: bool = False


def read_facts(checkpoint: Path) -> ModelFacts:
    """Look into a checkpoint's folder; what is wrong with its files is the services' to tell."""
    description = checkpoint / DESCRIPTION
    kinds = frozenset(
        value
        for value in _read_object(description).values()
        if isinstance(value, str) and value.startswith("W")
    )
    config = _read_object(checkpoint / "config.json")
    sizes = {
        field.name: config[field.name]
        for field in fields(ModelFacts)
        if type(config.get(field.name)) is int
    }
    return ModelFacts(
        **sizes,
        quant_types=kinds,
        has_quant_description=description.is_file(),
        is_known=bool(config),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
