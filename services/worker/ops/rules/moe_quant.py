"""Demands of the quantized expert products.

Sources: torch_npu's pages of the operators; where these are silent (int8 rows by int4 weights in
the grouped product) or name no sizes, CANN's pages and checks of GroupedMatmulV5,
GroupedMatmulWeightNz and GroupedMatmulSwigluQuant for A2 and A3. What only the blocked layout wants
of a weight's sizes is asked of every call.
"""

from types import MappingProxyType

import torch
from torch import Tensor

from services.worker.ops.form import INT8, INT32, INT64, SCALE, Blocked, Form, Kind, Sizes
from services.worker.ops.rules.rule import INNER_LIMIT, Arguments, Rule, Rules
from services.worker.ops.scalar_types import to_dtype

# For a bf16 result CANN's check takes a bf16 scale, and an fp32 one for fp16 only.
_COLUMN_SCALE = Kind("bf16", (torch.bfloat16,), (torch.float32,), agrees=False)
_ROWS_BLOCK, _BYTES_BLOCK = 16, 32
_PACKED = 8
_INT4_STEP = 64
_GROUPED_INT4_ROWS = 18432
_FUSED_COLUMNS = 10240
_FUSED_INT4_ROWS = 20000
_GATED_COLUMNS = 10496


def _single(value: object) -> Tensor:
    tensor = value[0] if isinstance(value, list) else value
    assert isinstance(tensor, Tensor)
    return tensor


def _is_int8(arguments: Arguments) -> bool:
    return _single(arguments["x"]).dtype is torch.int8


def is_plain(arguments: Arguments) -> bool:
    """Whether a grouped product is of float rows."""
    return not _is_int8(arguments)


def _is_packed(arguments: Arguments) -> bool:
    return _is_int8(arguments) and _single(arguments["weight"]).dtype is torch.int32


def _gives_sums(arguments: Arguments) -> bool:
    is_int32 = to_dtype(arguments["output_dtype"]) is torch.int32
    return _is_int8(arguments) and not _is_packed(arguments) and is_int32


def _output_violation(arguments: Arguments) -> str:
    found = to_dtype(arguments["output_dtype"])
    is_cpu = _single(arguments["x"]).device.type == "cpu"
    allowed = {torch.bfloat16, torch.float16} | ({torch.float32} if is_cpu else set())
    return "" if found in allowed else f"output_dtype: {found} must be bf16 or fp16"


def _int8_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K in steps of 16, N of 32, both below 65536; G at least 2 for counts."""
    inner, outer = sizes["K"], sizes["N"]
    if inner % _ROWS_BLOCK or outer % _BYTES_BLOCK:
        return f"{inner} by {outer}: steps of {_ROWS_BLOCK} and {_BYTES_BLOCK}"
    if max(inner, outer) >= INNER_LIMIT:
        return f"rows of {inner} and {outer} must be below {INNER_LIMIT}"
    if arguments["group_list_type"] == 1 and sizes["G"] < 2:
        return "one group: counts need two or more"
    return ""


def _scaled_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K in steps of 16, N of 32, both below 65536; G at least 2 for counts; output bf16 or fp16."""
    return _int8_limits(arguments, sizes) or _output_violation(arguments)


def _int4_limits(arguments: Arguments, sizes: Sizes) -> str:
    """N is 8P; K and N in steps of 64; K at most 18432; G at least 2; output bf16 or fp16."""
    inner, outer = sizes["K"], sizes["N"]
    if outer != _PACKED * sizes["P"]:
        return f"{outer} scales for {sizes['P']} packed columns of {_PACKED}"
    if inner % _INT4_STEP or outer % _INT4_STEP or inner > _GROUPED_INT4_ROWS:
        return f"{inner} by {outer}: steps of {_INT4_STEP}, at most {_GROUPED_INT4_ROWS} rows"
    if sizes["G"] < 2:
        return "one group: counts need two or more"
    return _output_violation(arguments)


def _fused_int4_limits(arguments: Arguments, sizes: Sizes) -> str:
    """W is 8P, in steps of 64, at most 10240; K in steps of 16, below 20000."""
    inner, outer = sizes["K"], sizes["W"]
    if outer != _PACKED * sizes["P"]:
        return f"{outer} scales for {sizes['P']} packed columns of {_PACKED}"
    if inner % _ROWS_BLOCK or outer % _INT4_STEP:
        return f"{inner} by {outer}: steps of {_ROWS_BLOCK} and {_INT4_STEP}"
    if inner >= _FUSED_INT4_ROWS or outer > _FUSED_COLUMNS:
        return f"{inner} by {outer}: below {_FUSED_INT4_ROWS} and at most {_FUSED_COLUMNS}"
    return ""


def _fused_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K in steps of 16, below 65536; W in steps of 32, at most 10240."""
    inner, outer = sizes["K"], sizes["W"]
    if inner % _ROWS_BLOCK or outer % _BYTES_BLOCK:
        return f"{inner} by {outer}: steps of {_ROWS_BLOCK} and {_BYTES_BLOCK}"
    if inner >= INNER_LIMIT or outer > _FUSED_COLUMNS:
        return f"{inner} by {outer}: below {INNER_LIMIT} and at most {_FUSED_COLUMNS}"
    return ""


def takes_gated_sums(width: int) -> bool:
    """Whether the device's gated unit on sums takes halves of `width` columns.

    A dense MLP of GLM-5.2, 12288 wide, is not among them unless ranks share it.
    """
    return width <= _GATED_COLUMNS


def _gated_limits(arguments: Arguments, sizes: Sizes) -> str:
    """W even, half of it at most 10496."""
    is_right = sizes["W"] % 2 == 0 and takes_gated_sums(sizes["W"] // 2)
    return "" if is_right else f"rows of {sizes['W']}: two halves of at most {_GATED_COLUMNS}"


def _grouped_gated_limits(arguments: Arguments, sizes: Sizes) -> str:
    """W in steps of 128, half of it at most 10496."""
    is_aligned = sizes["W"] % 128 == 0
    return _gated_limits(arguments, sizes) if is_aligned else f"{sizes['W']}: steps of 128"


def _has_groups(arguments: Arguments) -> bool:
    return arguments["group_index"] is not None


_PRODUCT = MappingProxyType({"split_item": (2, 3), "group_type": (0,), "act_type": (0,)})
_INT8_PRODUCT = MappingProxyType({**_PRODUCT, "group_list_type": (0, 1)})

GROUPED = (
    Rule(
        tensors={
            "x": Form("A K", INT8),
            "weight": Form("G K N", INT8, blocked=Blocked.ALLOWED),
            "group_list": Form("G", INT64),
        },
        options=_INT8_PRODUCT,
        limits=_int8_limits,
        case="int8 by int8, sums",
        applies=_gives_sums,
    ),
    Rule(
        tensors={
            "x": Form("A K", INT8),
            "weight": Form("G K P", INT32, blocked=Blocked.ALLOWED),
            # The bits of float32 scales, one group of rows for the whole inner size.
            "scale": Form("G 1 N", INT64),
            # 8 times the sum of each output's scaled weights; the kernel shifts the rows by 8.
            "bias": Form("G N", SCALE),
            "per_token_scale": Form("A", SCALE),
            "group_list": Form("G", INT64),
        },
        # The kernel reads counts, whatever it is told.
        options={**_PRODUCT, "group_list_type": (1,)},
        limits=_int4_limits,
        case="int8 by int4",
        applies=_is_packed,
    ),
    Rule(
        tensors={
            "x": Form("A K", INT8),
            "weight": Form("G K N", INT8, blocked=Blocked.ALLOWED),
            "scale": Form("G N", _COLUMN_SCALE),
            "per_token_scale": Form("A", SCALE),
            "group_list": Form("G", INT64),
        },
        options=_INT8_PRODUCT,
        limits=_scaled_limits,
        case="int8 by int8",
        applies=_is_int8,
    ),
)
"""The quantized cases of the grouped product."""

_FUSED_OPTIONS = MappingProxyType(
    {"dequant_mode": (0,), "dequant_dtype": (6,), "quant_mode": (0,), "group_list_type": (0, 1)}
)

RULES: Rules = MappingProxyType(
    {
        "npu_dequant_swiglu_quant": (
            Rule(
                tensors={
                    "x": Form("T W", INT32),
                    "weight_scale": Form("G W", SCALE),
                    "activation_scale": Form("T", SCALE),
                    "group_index": Form("G", INT64),
                },
                options={"quant_mode": (1,), "swiglu_mode": (0,)},
                limits=_grouped_gated_limits,
                case="by group",
                applies=_has_groups,
            ),
            Rule(
                # torch_npu's page has the scale in two dimensions, CANN's for A2 in one.
                tensors={
                    "x": Form("T W", INT32),
                    "weight_scale": Form("W", SCALE),
                    "activation_scale": Form("T", SCALE),
                },
                options={"quant_mode": (1,), "swiglu_mode": (0,)},
                limits=_gated_limits,
                case="one group",
            ),
        ),
        "npu_grouped_matmul_swiglu_quant_v2": (
            Rule(
                tensors={
                    "x": Form("A K", INT8),
                    "weight": Form("G K P", INT32, blocked=Blocked.REQUIRED),
                    "weight_scale": Form("G W", INT64),
                    "weight_assist_matrix": Form("G W", SCALE),
                    "x_scale": Form("A", SCALE),
                    "group_list": Form("G", INT64),
                },
                options=_FUSED_OPTIONS,
                limits=_fused_int4_limits,
                case="int8 by int4",
                applies=_is_packed,
            ),
            Rule(
                tensors={
                    "x": Form("A K", INT8),
                    "weight": Form("G K W", INT8, blocked=Blocked.REQUIRED),
                    "weight_scale": Form("G W", SCALE),
                    "x_scale": Form("A", SCALE),
                    "group_list": Form("G", INT64),
                },
                options=_FUSED_OPTIONS,
                limits=_fused_limits,
                case="int8 by int8",
            ),
        ),
    }
)
