"""Shape functions: the shapes and types that the CPU kernels return."""

from typing import Any

import pytest
import torch

from services.worker.ops import meta, registry


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAGED = {"block_table": torch.tensor([[1]], dtype=torch.int32), "layout_query": "TND"}
PACKED = torch.zeros((2, 128, 1, 656), dtype=torch.int8)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "npu_rms_norm": ((bf16(3, 8), bf16(8)), {}),
    "npu_add_rms_norm": ((bf16(3, 8), bf16(3, 8), bf16(8)), {}),
    "npu_interleave_rope": ((bf16(3, 2, 1, 64), bf16(3, 1, 1, 64), bf16(3, 1, 1, 64)), {}),
    "npu_kv_rmsnorm_rope_cache_v2": (
        (
            bf16(3, 1, 1, 576),
            bf16(512),
            bf16(3, 1, 1, 64),
            bf16(3, 1, 1, 64),
            torch.tensor([1, 2, 3]),
            bf16(2, 128, 1, 64),
            bf16(2, 128, 1, 512),
        ),
        {"cache_mode": "PA", "is_output_kv": True},
    ),
    "npu_scatter_nd_update_": ((bf16(9, 8), torch.tensor([[1], [2]]), bf16(2, 8)), {}),
    "npu_lightning_indexer": (
        (bf16(3, 8, 128), bf16(2, 128, 1, 128), bf16(3, 8)),
        PAGED
        | {
            "actual_seq_lengths_query": int32(3),
            "actual_seq_lengths_key": int32(5),
            "layout_key": "PA_BSND",
            "sparse_count": 16,
        },
    ),
    "npu_sparse_flash_attention": (
        (
            bf16(3, 4, 512),
            bf16(2, 128, 1, 512),
            bf16(2, 128, 1, 512),
            torch.zeros((3, 1, 16), dtype=torch.int32),
            0.1,
        ),
        PAGED
        | {
            "actual_seq_lengths_query": int32(3),
            "actual_seq_lengths_kv": int32(5),
            "query_rope": bf16(3, 4, 64),
            "key_rope": bf16(2, 128, 1, 64),
            "layout_kv": "PA_BSND",
            "attention_mode": 2,
        },
    ),
    "npu_dynamic_block_quant": ((bf16(3, 1, 512),), {"dst_type": 1}),
    "npu_quant_lightning_indexer": (
        (
            torch.zeros((3, 8, 128), dtype=torch.int8),
            torch.zeros((2, 128, 1, 128), dtype=torch.int8),
            torch.zeros((3, 8), dtype=torch.float16),
            torch.ones((3, 8), dtype=torch.float16),
            torch.ones((2, 128, 1), dtype=torch.float16),
            0,
            0,
        ),
        PAGED
        | {
            "actual_seq_lengths_query": int32(3),
            "actual_seq_lengths_key": int32(5),
            "layout_key": "PA_BSND",
            "sparse_count": 16,
        },
    ),
    "npu_kv_quant_sparse_flash_attention": (
        (bf16(3, 4, 576), PACKED, PACKED, torch.zeros((3, 1, 16), dtype=torch.int32), 0.1, 2, 2),
        PAGED
        | {
            "actual_seq_lengths_query": int32(3),
            "actual_seq_lengths_kv": int32(5),
            "layout_kv": "PA_BSND",
            "attention_mode": 2,
        },
    ),
    "npu_moe_gating_top_k": (
        (torch.randn(3, 8), 2),
        {"bias": torch.zeros(8), "norm_type": 1},
    ),
    "npu_moe_init_routing_v2": (
        (bf16(3, 8), torch.tensor([[0, 1], [2, 3], [0, 3]], dtype=torch.int32)),
        {
            "expert_num": 4,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "active_expert_range": [1, 4],
        },
    ),
    "npu_grouped_matmul": (
        ([bf16(6, 8)], [bf16(2, 8, 10)]),
        {
            "group_list": torch.tensor([2, 4]),
            "split_item": 2,
            "group_type": 0,
            "group_list_type": 1,
        },
    ),
    "npu_swiglu": ((bf16(3, 8),), {}),
    "npu_moe_token_unpermute": ((bf16(6, 8), int32(0, 2, 4, 1, 3, 5), bf16(3, 2)), {}),
    "npu_transpose_batchmatmul": (
        (bf16(3, 4, 8), bf16(4, 8, 10)),
        {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]},
    ),
}
# Results that a device leaves empty in this mode, whatever the shape function says.
UNUSED = {"npu_moe_init_routing_v2": {3}}


def to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, list):
        return [to_meta(entry) for entry in value]
    return value


def as_list(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def test_every_operator_is_compared() -> None:
    others = {  # test_meta_moe_quant.py, test_meta_quant.py, test_distribute.py
        "npu_moe_distribute_combine_v2",
        "npu_moe_distribute_dispatch_v2",
        "npu_dynamic_quant",
        "npu_quantize",
        "npu_quant_matmul",
        "npu_format_cast",
        "npu_dequant_swiglu_quant",
        "npu_grouped_matmul_swiglu_quant_v2",
    }
    assert CALLS.keys() | others == meta.kernels().keys()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("version", ["torch", "compiled"])
def test_shapes_and_types_equal_those_of_the_kernels(
    name: str, version: str, compiled: dict[str, Any]
) -> None:
    native = next(iter(compiled.values())) if version == "compiled" else None
    arguments, options = CALLS[name]
    real = as_list(registry.cpu_kernels(native)[name](*arguments, **options))
    shaped = as_list(
        meta.kernels()[name](
            *[to_meta(value) for value in arguments],
            **{key: to_meta(value) for key, value in options.items()},
        )
    )
    assert len(real) == len(shaped)
    for at, (ours, shape) in enumerate(zip(real, shaped, strict=True)):
        if at not in UNUSED.get(name, set()):
            assert (ours.shape, ours.dtype) == (shape.shape, shape.dtype), f"result {at}"
