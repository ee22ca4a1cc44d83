"""Demands of norms, rotary angles, row writes, gated units and per-head products."""

from types import MappingProxyType

import torch

from services.worker.ops.form import INDEX, INT8, WIDE, Form, Sizes
from services.worker.ops.rules.rule import INNER_LIMIT, Arguments, Rule, Rules

_BY_HEAD = [1, 0, 2]


def _swiglu_limits(arguments: Arguments, sizes: Sizes) -> str:
    """W even, dim the last."""
    is_last = arguments["dim"] in {-1, arguments["input"].dim() - 1}
    return "" if is_last and sizes["W"] % 2 == 0 else "the last size must be two equal halves"


def takes_batchmatmul(heads: int, inner: int, outer: int) -> bool:
    """Whether the device's per-head product takes [T, heads, inner] by [heads, inner, outer].

    CANN 9 on A2 and A3 wants both sizes of a matrix in steps of 128 (later ones 16), and rows below
    65536 elements. GLM-5.2's absorbed query side, 192 wide, is not among them.
    """
    return inner % 128 == 0 and outer % 128 == 0 and heads * inner < INNER_LIMIT


def _batchmatmul_limits(arguments: Arguments, sizes: Sizes) -> str:
    """M and N multiples of 128; H times M below 65536."""
    heads, inner, outer = sizes["H"], sizes["M"], sizes["N"]
    if takes_batchmatmul(heads, inner, outer):
        return ""
    return f"{heads} matrices of {inner} by {outer}: steps of 128, rows below {INNER_LIMIT}"


def _has_8bit_rows(arguments: Arguments) -> bool:
    return bool(arguments["input"].dtype is torch.int8)


_ANGLES = Form("T 1 1 64")

RULES: Rules = MappingProxyType(
    {
        "npu_add_rms_norm": (
            Rule(
                tensors={"x1": Form("T E", WIDE), "x2": Form("T E", WIDE), "gamma": Form("E", WIDE)}
            ),
        ),
        # The torch_npu page wants flat rows here; CANN's takes views, and copies what it must.
        "npu_interleave_rope": (
            Rule(tensors={"x": Form("T H 1 64"), "cos": _ANGLES, "sin": _ANGLES}),
        ),
        "npu_rms_norm": (Rule(tensors={"input": Form("... E", WIDE), "gamma": Form("E", WIDE)}),),
        "npu_scatter_nd_update_": (
            Rule(
                tensors={
                    "input": Form("A N", INT8, is_flat=True),
                    "indices": Form("T 1", INDEX),
                    "updates": Form("T N", INT8),
                },
                case="packed rows, 8-bit keys",
                applies=_has_8bit_rows,
            ),
            Rule(
                tensors={
                    "input": Form("A N", WIDE, is_flat=True),
                    "indices": Form("T 1", INDEX),
                    "updates": Form("T N", WIDE),
                },
                case="rows of numbers",
            ),
        ),
        "npu_swiglu": (Rule(tensors={"input": Form("... W", WIDE)}, limits=_swiglu_limits),),
        "npu_transpose_batchmatmul": (
            Rule(
                tensors={"input": Form("T H M", WIDE), "weight": Form("H M N", WIDE, is_flat=True)},
                options={
                    "perm_x1": (_BY_HEAD,),
                    "perm_x2": (None, [0, 1, 2]),
                    "perm_y": (_BY_HEAD,),
                    "batch_split_factor": (None, 1),
                },
                limits=_batchmatmul_limits,
            ),
        ),
    }
)
