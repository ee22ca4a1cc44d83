"""Demands of the dense quantized operators on A2 and A3.

Sources: torch_npu's pages of the operators, and CANN's of the kernels behind them (AscendQuantV3,
QuantMatmulV4 and QuantMatmulWeightNz, NpuFormatCast). Newer CANN pages allow sizes above 65535.
"""

from types import MappingProxyType

import torch

from services.worker.ops.form import FLOAT, INT8, INT32, SCALE, WIDE, Blocked, Form, Kind, Sizes
from services.worker.ops.rules.rule import INNER_LIMIT, Arguments, Rule, Rules
from services.worker.ops.scalar_types import to_dtype

_COLUMN_SCALE = Kind("fp32 or bf16", (torch.float32, torch.bfloat16), agrees=False)


def _dynamic_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Two dimensions or more; dst_type int8 (fp8 on A5)."""
    if arguments["input"].dim() < 2:
        return "input must have two dimensions or more"
    dst_type = arguments["dst_type"]
    is_known = dst_type is None or to_dtype(dst_type) in {torch.int8, torch.float8_e4m3fn}
    return "" if is_known else f"dst_type {dst_type} must be int8 (fp8 on A5)"


def _static_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Type qint8; axis the last."""
    if to_dtype(arguments["dtype"]) is not torch.qint8:
        return f"dtype {arguments['dtype']} must be qint8"
    is_last = arguments["axis"] in {-1, arguments["input"].dim() - 1}
    return "" if is_last else f"axis {arguments['axis']} must be the last"


def _size_limits(sizes: Sizes) -> str:
    if max(sizes["K"], sizes["N"]) < INNER_LIMIT:
        return ""
    return f"rows of {sizes['K']} and {sizes['N']} must be below {INNER_LIMIT}"


def _product_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K and N below 65536; output bf16."""
    output = to_dtype(arguments["output_dtype"])
    is_cpu = arguments["x1"].device.type == "cpu"
    if output is not torch.bfloat16 and not (is_cpu and output is torch.float32):
        return f"output_dtype: {output} must be bf16"
    return _size_limits(sizes)


def _sum_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K and N below 65536."""
    return _size_limits(sizes)


def _has_one_scale(arguments: Arguments) -> bool:
    return bool(arguments["scales"].numel() == 1)


def _gives_sums(arguments: Arguments) -> bool:
    return to_dtype(arguments["output_dtype"]) is torch.int32


def _has_row_scales(arguments: Arguments) -> bool:
    return arguments["pertoken_scale"] is not None


_STATIC_OPTIONS = MappingProxyType({"div_mode": (False,)})
_FACTORS = MappingProxyType(
    {
        "x1": Form("T K", INT8, is_flat=True),
        "x2": Form("K N", INT8, is_flat=True, blocked=Blocked.ALLOWED),
        "scale": Form("N", _COLUMN_SCALE, is_flat=True),
    }
)

RULES: Rules = MappingProxyType(
    {
        "npu_dynamic_quant": (
            Rule(
                tensors={"input": Form("... E", FLOAT)},
                options={"quant_mode": ("pertoken",), "dst_type_max": (0.0,)},
                limits=_dynamic_limits,
            ),
        ),
        # Scales and zero points have the type of the input: torch_npu's newer page, and CANN's.
        "npu_quantize": (
            Rule(
                tensors={
                    "input": Form("... E", WIDE),
                    "scales": Form("1", WIDE),
                    "zero_points": Form("1", WIDE),
                },
                options=_STATIC_OPTIONS,
                limits=_static_limits,
                case="one scale",
                applies=_has_one_scale,
            ),
            Rule(
                tensors={
                    "input": Form("... E", WIDE),
                    "scales": Form("E", WIDE),
                    "zero_points": Form("E", WIDE),
                },
                options=_STATIC_OPTIONS,
                limits=_static_limits,
                case="a scale per column",
            ),
        ),
        "npu_quant_matmul": (
            Rule(
                # The scale must be there and counts for nothing: these sums are scaled later.
                tensors=_FACTORS,
                limits=_sum_limits,
                case="sums",
                applies=_gives_sums,
            ),
            Rule(
                tensors={**_FACTORS, "pertoken_scale": Form("T", SCALE, is_flat=True)},
                limits=_product_limits,
                case="a scale per row",
                applies=_has_row_scales,
            ),
            Rule(
                tensors={**_FACTORS, "bias": Form("N", INT32, is_flat=True)},
                limits=_product_limits,
                case="one scale for all rows",
            ),
        ),
        "npu_format_cast": (
            Rule(
                # Of four-byte elements A2 and A3 make other blocks than of the int4 they stand for.
                tensors={"input": Form("... K N", INT8, is_flat=True)},
                options={
                    "acl_format": (29,),
                    "customize_dtype": (None,),
                    "input_dtype": (None,),
                },
            ),
        ),
    }
)
