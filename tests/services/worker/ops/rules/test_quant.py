"""Rules of the dense int8 operators: what the model calls passes, each known trap does not."""

from typing import Any

import pytest
import torch

from services.worker.ops import nz
from services.worker.ops.device_rules import DeviceGuard, bind, find_violation
from services.worker.ops.schemas import SCHEMAS

INT8, INT32, F32, BF16 = torch.int8, torch.int32, torch.float32, torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    schema = torch._C.parse_schema(f"npu::{SCHEMAS[name]}")
    return find_violation(name, bind(schema, args, kwargs))


def dynamic(**changes: Any) -> str:
    return call("npu_dynamic_quant", **({"input": meta(3, 64)} | changes))


def static(**changes: Any) -> str:
    named = {
        "input": meta(3, 64),
        "scales": meta(1),
        "zero_points": meta(1),
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    }
    return call("npu_quantize", **(named | changes))


def columns(**changes: Any) -> str:
    return static(**({"scales": meta(64), "zero_points": meta(64)} | changes))


def product(inner: int = 64, outer: int = 48, **changes: Any) -> str:
    named = {
        "x1": meta(3, inner, dtype=INT8),
        "x2": meta(inner, outer, dtype=INT8),
        "scale": meta(outer, dtype=F32),
        "pertoken_scale": meta(3, dtype=F32),
        "output_dtype": BF16,
    }
    return call("npu_quant_matmul", **(named | changes))


def static_product(**changes: Any) -> str:
    return product(**({"pertoken_scale": None, "bias": meta(48, dtype=INT32)} | changes))


def sums(**changes: Any) -> str:
    return product(**({"pertoken_scale": None, "output_dtype": INT32} | changes))


def cast(**changes: Any) -> str:
    named = {"input": meta(4, 64, 48, dtype=INT8), "acl_format": 29}
    return call("npu_format_cast", **(named | changes))


@pytest.mark.parametrize(
    "make_call",
    [dynamic, static, columns, product, static_product, sums, cast],
    ids=lambda f: f.__name__,
)
def test_right_calls_pass(make_call: Any) -> None:
    assert make_call() == ""


def test_what_else_the_model_may_pass() -> None:
    assert dynamic(input=meta(2, 3, 64), dst_type=torch.float8_e4m3fn) == ""
    assert dynamic(input=meta(3, 80)[:, 16:]) == ""
    assert product(scale=meta(48)) == ""
    assert product(x2=nz.shaped(meta(64, 48, dtype=INT8))) == ""


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (dynamic(input=meta(64)), "two dimensions"),
        (dynamic(input=meta(3, 64, dtype=F32)), "must be bf16 or fp16"),
        (dynamic(dst_type=torch.int32), "dst_type"),
        (dynamic(quant_mode="pertensor"), "quant_mode"),
        (dynamic(smooth_scales=meta(64)), "smooth_scales: this version passes no tensor"),
        (static(scales=meta(1, dtype=F32)), "differs from another argument's type"),
        (static(zero_points=meta(1, dtype=F32)), "differs from another argument's type"),
        (static(zero_points=meta(64)), "must be [1]"),
        (static(zero_points=None), "must be one tensor"),
        (static(dtype=torch.quint8), "must be qint8"),
        (static(axis=0), "axis 0"),
        (static(div_mode=True), "div_mode"),
        (columns(scales=meta(63)), "must be [E]"),
        (product(x1=meta(3, 64, dtype=BF16)), "bfloat16 must be int8"),
        (product(x2=meta(48, 64, dtype=INT8).t()), "not contiguous"),
        (product(x2=meta(63, 48, dtype=INT8)), "must be [K N]"),
        (product(scale=meta(1, dtype=F32)), "must be [N]"),
        (product(scale=meta(48, dtype=torch.int64)), "must be fp32 or bf16"),
        (product(pertoken_scale=meta(3, 1, dtype=F32)), "must be [T]"),
        (product(pertoken_scale=meta(3)), "must be fp32"),
        (product(output_dtype=None), "must be bf16"),
        (product(output_dtype=F32), "must be bf16"),
        (product(bias=meta(48, dtype=INT32)), "bias: this version passes no tensor"),
        (product(inner=65536), "must be below 65536"),
        (product(outer=65536), "must be below 65536"),
        (static_product(bias=None), "must be one tensor"),
        (static_product(bias=meta(48)), "must be int32"),
        (sums(pertoken_scale=meta(3, dtype=F32)), "passes no tensor"),
        (sums(scale=None), "must be one tensor"),
        (sums(outer=65536), "must be below 65536"),
        (cast(acl_format=2), "acl_format"),
        (cast(input=meta(64, 48)), "must be int8"),
        (cast(input=meta(4, 64, 6, dtype=INT32)), "must be int8"),  # cast first, then view as int32
        (cast(input=nz.shaped(meta(64, 48, dtype=INT8))), "is in the blocked layout"),
        (cast(input=meta(48, 64, dtype=INT8).t()), "not contiguous"),
        (cast(customize_dtype=1), "customize_dtype"),
    ],
)
def test_each_trap_is_refused_with_its_reason(found: str, reason: str) -> None:
    assert reason in found


def test_a_packed_weight_is_whole_and_may_give_float32_on_a_cpu() -> None:
    x, weight = torch.ones(3, 64, dtype=INT8), torch.ones(64, 48, dtype=INT8)
    with DeviceGuard():
        packed = torch.ops.npu.npu_format_cast(weight, nz.FRACTAL_NZ)
        result = torch.ops.npu.npu_quant_matmul(
            x, packed, torch.ones(48), pertoken_scale=torch.ones(3), output_dtype=F32
        )
    assert result.unique().tolist() == [64.0]
