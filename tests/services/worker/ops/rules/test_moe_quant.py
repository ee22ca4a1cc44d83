"""Rules of the quantized expert products: what the model calls passes, each known trap does not."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz
from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.schemas import SCHEMAS

INT8, INT32, INT64 = torch.int8, torch.int32, torch.int64
F32, BF16 = torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    schema = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
    return find_violation(name, bind(schema, args, kwargs))


def grouped(inner: int = 64, outer: int = 192, groups: int = 4, **changes: Any) -> str:
    x = changes.pop("x", meta(6, inner, dtype=INT8))
    weight = changes.pop("weight", meta(groups, inner, outer, dtype=INT8))
    named = {
        "scale": [meta(groups, outer, dtype=BF16)],
        "per_token_scale": [meta(6, dtype=F32)],
        "group_list": meta(groups, dtype=INT64),
        "group_list_type": 1,
        "split_item": 2,
        "group_type": 0,
        "output_dtype": BF16,
    } | changes
    return call("npu_grouped_matmul", [x], [weight], **named)


def sums(**changes: Any) -> str:
    none = {"scale": None, "per_token_scale": None, "output_dtype": INT32}
    return grouped(**(none | changes))


def packed(inner: int = 64, outer: int = 192, groups: int = 4, **changes: Any) -> str:
    named = {
        "weight": meta(groups, inner, outer // 8, dtype=INT32),
        "scale": [meta(groups, 1, outer, dtype=INT64)],
        "bias": [meta(groups, outer, dtype=F32)],
    } | changes
    return grouped(inner, outer, groups, **named)


def fused(inner: int = 192, outer: int = 128, **changes: Any) -> str:
    named = {
        "x": meta(6, inner, dtype=INT8),
        "weight": [nz.shaped(meta(4, inner, outer, dtype=INT8))],
        "weight_scale": [meta(4, outer, dtype=F32)],
        "x_scale": meta(6, dtype=F32),
        "group_list": meta(4, dtype=INT64),
        "group_list_type": 1,
    } | changes
    return call("npu_grouped_matmul_swiglu_quant_v2", **named)


def fused_packed(inner: int = 192, outer: int = 128, **changes: Any) -> str:
    named = {
        "x": meta(6, inner, dtype=INT8),
        "weight": [nz.shaped(meta(4, inner, outer // 8, dtype=INT32))],
        "weight_scale": [meta(4, outer, dtype=INT64)],
        "weight_assist_matrix": [meta(4, outer, dtype=F32)],
        "x_scale": meta(6, dtype=F32),
        "group_list": meta(4, dtype=INT64),
        "group_list_type": 1,
    } | changes
    return call("npu_grouped_matmul_swiglu_quant_v2", **named)


def gated(width: int = 128, groups: int = 4, **changes: Any) -> str:
    named = {
        "weight_scale": meta(groups, width, dtype=F32),
        "activation_scale": meta(6, dtype=F32),
        "group_index": meta(groups, dtype=INT64),
        "activate_left": True,
        "quant_mode": 1,
    } | changes
    return call("npu_dequant_swiglu_quant", meta(6, width, dtype=INT32), **named)


def gated_together(**changes: Any) -> str:
    one = {"weight_scale": meta(128, dtype=F32), "group_index": None}
    return gated(**(one | changes))


@pytest.mark.parametrize(
    "make_call",
    [grouped, sums, packed, fused, fused_packed, gated, gated_together],
    ids=lambda f: f.__name__,
)
def test_right_calls_pass(make_call: Any) -> None:
    assert make_call() == ""


def test_the_sizes_of_glm_5_2_pass() -> None:
    assert fused(6144, 4096) == fused_packed(6144, 4096) == ""
    assert grouped(2048, 6144) == packed(2048, 6144) == sums(inner=6144, outer=4096) == ""
    assert gated(4096) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (grouped(scale=[meta(4, 192, dtype=F32)]), "scale: torch.float32 must be bf16"),
        (grouped(scale=[meta(4, 190, dtype=BF16)]), "scale"),
        (grouped(per_token_scale=[meta(6, dtype=BF16)]), "bfloat16 must be fp32"),
        (grouped(per_token_scale=None), "per_token_scale"),
        (grouped(output_dtype=F32), "output_dtype: torch.float32 must be bf16 or fp16"),
        (grouped(output_dtype=None), "output_dtype: None"),
        (grouped(bias=[meta(4, 192, dtype=INT32)]), "bias: this version passes no tensor here"),
        (grouped(outer=72), "64 by 72: steps of 16 and 32"),
        (grouped(inner=24), "24 by 192: steps of 16 and 32"),
        (grouped(outer=65536), "must be below 65536"),
        (grouped(groups=1), "counts need two or more"),
        (grouped(group_list_type=2), "group_list_type"),
        (sums(scale=[meta(4, 192, dtype=BF16)]), "scale: this version passes no tensor here"),
        (sums(outer=72), "steps of 16 and 32"),
        (packed(scale=[meta(4, 192, dtype=INT64)]), "must be [G 1 N]"),
        (packed(scale=[meta(4, 1, 192, dtype=F32)]), "float32 must be int64"),
        (packed(bias=None), "bias: must be one tensor"),
        (packed(bias=[meta(4, 192, dtype=BF16)]), "bias: torch.bfloat16 must be fp32"),
        (packed(group_list_type=0), "group_list_type: 0 must be one of [1]"),
        (packed(inner=32), "32 by 192: steps of 64"),
        (packed(inner=18496), "at most 18432 rows"),
        (packed(weight=meta(4, 64, 23, dtype=INT32)), "192 scales for 23 packed columns"),
        (packed(groups=1), "counts need two or more"),
        (packed(output_dtype=INT32), "output_dtype: torch.int32"),
        (fused(weight=[meta(4, 192, 128, dtype=torch.int16)]), "int16 must be int8"),
        (fused(weight_scale=[meta(4, 128, dtype=BF16)]), "bfloat16 must be fp32"),
        (fused(x_scale=meta(6, 1, dtype=F32)), "x_scale"),
        (fused(bias=meta(4, 128, dtype=INT32)), "bias: this version passes no tensor here"),
        (fused(outer=10272), "at most 10240"),
        (fused(inner=65536), "below 65536"),
        (fused(weight=[meta(4, 192, 128, dtype=INT8)]), "must be in the blocked layout (NZ)"),
        (fused_packed(dequant_mode=1), "dequant_mode"),
        (fused_packed(smooth_scale=meta(4, dtype=F32)), "smooth_scale"),
        (fused_packed(weight_assist_matrix=None), "weight_assist_matrix: must be one tensor"),
        (fused_packed(weight_scale=[meta(4, 128, dtype=F32)]), "float32 must be int64"),
        (fused_packed(inner=20000), "below 20000"),
        (fused_packed(outer=160), "steps of 16 and 64"),
        (gated(width=96), "96: steps of 128"),
        (gated(width=21120), "at most 10496"),
        (gated(quant_mode=0), "quant_mode"),
        (gated(swiglu_mode=1), "swiglu_mode"),
        (gated(group_index=meta(4, dtype=INT32)), "int32 must be int64"),
        (gated(activation_scale=None), "activation_scale"),
        (gated_together(weight_scale=meta(4, 128, dtype=F32)), "must be [W]"),
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found


def test_a_cpu_takes_float32_where_a_device_does_not() -> None:
    x, weight = torch.zeros((6, 64), dtype=INT8), torch.zeros((2, 64, 32), dtype=INT8)
    assert (
        call(
            "npu_grouped_matmul",
            [x],
            [weight],
            scale=[torch.ones(2, 32)],
            per_token_scale=[torch.ones(6)],
            group_list=torch.tensor([2, 4]),
            group_list_type=1,
            split_item=2,
            group_type=0,
            output_dtype=F32,
        )
        == ""
    )
