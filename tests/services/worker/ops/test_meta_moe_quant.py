"""Shape functions of the expert products in int8: each way of calling them."""

from typing import Any

import pytest
import torch

from services.worker.ops import meta, nz, registry

COUNTS = torch.tensor([1, 3])
X = torch.ones((6, 16), dtype=torch.int8)
INT8 = nz.pack(torch.ones((2, 16, 64), dtype=torch.int8))
INT4 = INT8.view(torch.int32)  # 128 columns
ROWS = torch.ones(6)
PRODUCT = {"group_list": COUNTS, "split_item": 2, "group_type": 0, "group_list_type": 1}

CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "int8 by int8": (
        "npu_grouped_matmul",
        ([X], [INT8]),
        PRODUCT
        | {
            "scale": [torch.ones(2, 64)],
            "per_token_scale": [ROWS],
            "output_dtype": torch.bfloat16,
        },
    ),
    "sums": ("npu_grouped_matmul", ([X], [INT8]), PRODUCT | {"output_dtype": torch.int32}),
    "int8 by int4": (
        "npu_grouped_matmul",
        ([X], [INT4]),
        PRODUCT
        | {
            "scale": [torch.ones((2, 1, 128), dtype=torch.int64)],
            "bias": [torch.zeros(2, 128)],
            "per_token_scale": [ROWS],
            "output_dtype": 15,  # bfloat16, as the dispatcher passes it
        },
    ),
    "fused": (
        "npu_grouped_matmul_swiglu_quant_v2",
        (X, [INT8], [torch.ones(2, 64)], ROWS, COUNTS),
        {"group_list_type": 1},
    ),
    "fused, int4": (
        "npu_grouped_matmul_swiglu_quant_v2",
        (X, [INT4], [torch.ones((2, 128), dtype=torch.int64)], ROWS, COUNTS),
        {"group_list_type": 1, "weight_assist_matrix": [torch.zeros(2, 128)]},
    ),
    "gated": (
        "npu_dequant_swiglu_quant",
        (torch.ones((6, 8), dtype=torch.int32),),
        {"weight_scale": torch.ones(8), "activation_scale": ROWS, "quant_mode": 1},
    ),
    "routing that quantizes": (
        "npu_moe_init_routing_v2",
        (torch.ones(3, 8), torch.tensor([[0, 1], [2, 3], [0, 3]], dtype=torch.int32)),
        {
            "expert_num": 4,
            "expert_tokens_num_type": 1,
            "expert_tokens_num_flag": True,
            "quant_mode": 1,
        },
    ),
}


def to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return [to_meta(entry) for entry in value] if isinstance(value, list) else value


def shapes(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in result]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("version", ["torch", "compiled"])
def test_each_kind_of_call_has_the_shapes_and_types_of_the_kernels(
    case: str, version: str, compiled: dict[str, Any]
) -> None:
    native = next(iter(compiled.values())) if version == "compiled" else None
    name, arguments, options = CALLS[case]
    real = registry.cpu_kernels(native)[name](*arguments, **options)
    shaped = meta.kernels()[name](
        *[to_meta(value) for value in arguments],
        **{key: to_meta(value) for key, value in options.items()},
    )
    assert shapes(real) == shapes(shaped)
