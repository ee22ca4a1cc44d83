"""The rules of norms, row writes, gated units and per-head products."""

import pytest
import torch

from services.worker.ops.device_rules import bind, find_violation
from services.worker.ops.rules.dense import takes_batchmatmul
from services.worker.ops.schemas import SCHEMAS

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(name: str, *args: object, **kwargs: object) -> str:
    return find_violation(name, bind(torch._C.parse_schema(f"npu::{SCHEMAS[name]}"), args, kwargs))


def test_the_small_operators_hold_their_shapes() -> None:
    matmul = {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}
    weight = meta(4, 512, 256)
    assert call("npu_transpose_batchmatmul", meta(3, 4, 512), weight, **matmul) == ""
    assert "perm_x1" in call("npu_transpose_batchmatmul", meta(3, 4, 512), weight)
    indices = meta(6, dtype=torch.int32)
    assert call("npu_moe_token_unpermute", meta(6, 8), indices, meta(3, 2)) == ""
    assert "each token and choice" in call(
        "npu_moe_token_unpermute", meta(6, 8), indices, meta(2, 2)
    )
    assert call("npu_swiglu", meta(3, 8)) == ""
    assert "two equal halves" in call("npu_swiglu", meta(3, 7))
    assert "gamma" in call("npu_rms_norm", meta(3, 8), meta(9))
    assert "updates" in call(
        "npu_scatter_nd_update_", meta(9, 8), meta(2, 1, dtype=torch.int64), meta(3, 8)
    )


@pytest.mark.parametrize(
    ("heads", "inner", "outer"),
    [(64, 192, 512), (4, 512, 64), (128, 512, 256)],  # GLM-5.2's query side, narrow, too long rows
)
def test_sizes_that_the_per_head_product_refuses(heads: int, inner: int, outer: int) -> None:
    assert not takes_batchmatmul(heads, inner, outer)
    arguments = {"perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}
    x, weight = meta(3, heads, inner), meta(heads, inner, outer)
    assert "steps of 128" in call("npu_transpose_batchmatmul", x, weight, **arguments)
