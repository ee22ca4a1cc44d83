"""What the arguments must be that a device takes with any value: the model's own numbers.

An epsilon of another norm, or one expert too few, is a call that no device refuses. So every
argument of a call is a tensor or an option of a rule, one of these, or left at its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import FunctionSchema, Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import RULES
from services.worker.ops.scalar_types import to_dtype

Arguments = Mapping[str, Any]
Number = Callable[[ModelSpec, Arguments], object]


def find_wrong_number(
    spec: ModelSpec, operator: str, schema: FunctionSchema, arguments: Arguments
) -> str:
    """The first argument of a call that is neither the model's number nor the default, and why."""
    numbers = NUMBERS.get(operator, {})
    for declared in schema.arguments:
        name = declared.name
        value = arguments[name]
        if (operator, name) in _A2_TENSORS and (value is not None) != _is_a2(spec):
            return f"{name}: an A2 must have it, and no other"
        if name in numbers:
            expected = numbers[name](spec, arguments)
        elif _holds_tensors(value) or any(name in rule.options for rule in RULES[operator]):
            continue
        else:
            expected = declared.default_value
        found = to_dtype(value) if isinstance(expected, torch.dtype) else value
        if found != expected:
            return f"{name} is {value!r}, must be {expected!r}"
    return ""


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, list) and any(map(_holds_tensors, value))
    )


def _config(read: Callable[[ModelConfig], object]) -> Number:
    return lambda spec, arguments: read(spec.config)


def _always(value: object) -> Number:
    return lambda spec, arguments: value


def _norm_epsilon(spec: ModelSpec, arguments: Arguments) -> float:
    """Norms over latents have an epsilon of their own."""
    config = spec.config
    is_latent = arguments["gamma"].shape[0] in {config.q_lora_rank, config.kv_lora_rank}
    return config.latent_norm_eps if is_latent else config.rms_norm_eps


def _result_type(spec: ModelSpec, arguments: Arguments) -> torch.dtype | None:
    """Sums where nothing scales them, and nothing to say where rows are float."""
    rows = arguments["x"][0] if "x" in arguments else arguments["x1"]
    if rows.is_floating_point():
        return None
    names = ("per_token_scale", "pertoken_scale", "bias")
    is_scaled = any(arguments.get(name) is not None for name in names)
    return spec.dtype if is_scaled else torch.int32


def _row_type(spec: ModelSpec, arguments: Arguments) -> torch.dtype | None:
    """Keys and queries of indexers in the cache's type; None, which is int8, for products."""
    is_key = arguments["input"].shape[-1] == spec.config.index_head_dim
    return spec.cache.eight_bit_type if is_key and arguments["dst_type"] is not None else None


def _is_second_sorting(arguments: Arguments) -> bool:
    """Whether rows are sorted that came from other ranks, each for one expert of this rank."""
    return bool(arguments["expert_idx"].shape[1] == 1)


def _num_local(spec: ModelSpec) -> int:
    return len(spec.placement.experts(spec.config.n_routed_experts))


def _expert_num(spec: ModelSpec, arguments: Arguments) -> int:
    """One more than there are where padding of other replicas chose nobody."""
    if _is_second_sorting(arguments):
        return _num_local(spec)
    return spec.config.n_routed_experts + (spec.placement.ep_size > spec.placement.tp_size)


def _active_range(spec: ModelSpec, arguments: Arguments) -> list[int]:
    """The rank's own experts, or all where their rows are sent on."""
    num_experts = spec.config.n_routed_experts
    if _is_second_sorting(arguments):
        return [0, _num_local(spec)]
    if arguments["active_expert_range"] == [0, num_experts]:
        return [0, num_experts]
    experts = spec.placement.experts(num_experts)
    return [experts.start, experts.stop]


def _is_a2(spec: ModelSpec) -> bool:
    return spec.cache.generation == "a2"


_A2_TENSORS = frozenset(
    {
        ("npu_moe_distribute_dispatch_v2", "expert_scales"),
        ("npu_moe_distribute_combine_v2", "expand_scales"),
    }
)
"""An A2 adds up between machines, for which it wants the experts' weights with the rows."""

_SCALE = _config(lambda config: config.softmax_scale)
_TOPK = _config(lambda config: config.index_topk)
_EXCHANGE: Mapping[str, Number] = MappingProxyType(
    {
        "group_ep": _always("mc2"),
        "ep_world_size": lambda spec, _: spec.placement.ep_size,
        "ep_rank_id": lambda spec, _: spec.placement.ep_rank,
        "moe_expert_num": _config(lambda config: config.n_routed_experts),
    }
)

NUMBERS: Mapping[str, Mapping[str, Number]] = MappingProxyType(
    {
        "npu_add_rms_norm": {"epsilon": _config(lambda config: config.rms_norm_eps)},
        "npu_dequant_swiglu_quant": {"activate_left": _always(True)},  # gate columns come first
        "npu_dynamic_block_quant": {"dst_type": lambda spec, _: spec.cache.eight_bit_type},
        "npu_dynamic_quant": {"dst_type": _row_type},
        "npu_grouped_matmul": {
            "split_item": _always(2),
            "group_list_type": _always(1),  # the model always has counts
            "output_dtype": _result_type,
        },
        "npu_grouped_matmul_swiglu_quant_v2": {"group_list_type": _always(1)},
        "npu_kv_quant_sparse_flash_attention": {"scale_value": _SCALE},
        "npu_kv_rmsnorm_rope_cache_v2": {"epsilon": _config(lambda config: config.latent_norm_eps)},
        "npu_lightning_indexer": {"sparse_count": _TOPK},
        "npu_moe_distribute_combine_v2": _EXCHANGE,
        "npu_moe_distribute_dispatch_v2": _EXCHANGE,
        "npu_moe_gating_top_k": {
            "k": _config(lambda config: config.num_experts_per_tok),
            "k_group": _config(lambda config: config.topk_group),
            "group_count": _config(lambda config: config.n_group),
            "routed_scaling_factor": _config(lambda config: config.routed_scaling_factor),
            "eps": _always(1e-20),
        },
        "npu_moe_init_routing_v2": {
            "active_num": lambda _, arguments: arguments["expert_idx"].numel(),
            "expert_num": _expert_num,
            "active_expert_range": _active_range,
        },
        "npu_quant_lightning_indexer": {"sparse_count": _TOPK},
        "npu_quant_matmul": {"output_dtype": _result_type},
        "npu_quantize": {"dtype": _always(torch.qint8), "axis": _always(-1)},
        "npu_rms_norm": {"epsilon": _norm_epsilon},
        "npu_sparse_flash_attention": {"scale_value": _SCALE},
    }
)
