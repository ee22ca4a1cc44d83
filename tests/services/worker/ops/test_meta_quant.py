"""Shape functions of the dense int8 operators: each way of calling them."""

from typing import Any

import pytest
import torch

from services.worker.ops import meta, nz, registry

BF16 = torch.bfloat16
ROWS = torch.ones((6, 16), dtype=torch.int8)
WEIGHT = torch.ones((16, 40), dtype=torch.int8)
PACKED = nz.pack(WEIGHT)
COLUMNS = torch.ones(40)

CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "a row's own scale": ("npu_dynamic_quant", (torch.ones(6, 16, dtype=BF16),), {}),
    "of rows in groups": ("npu_dynamic_quant", (torch.ones(2, 3, 16),), {"dst_type": torch.int8}),
    "of rows that lie apart": ("npu_dynamic_quant", (torch.ones(6, 20)[:, 4:],), {}),
    "fp8": ("npu_dynamic_quant", (torch.ones(6, 16),), {"dst_type": torch.float8_e4m3fn}),
    "one scale": (
        "npu_quantize",
        (torch.ones(6, 16), torch.ones(1), torch.ones(1), torch.qint8, -1, False),
        {},
    ),
    "one scale, as numbers": (
        "npu_quantize",
        (torch.ones(6, 16), torch.ones(16), None, 12, 1, False),  # 12: qint8
        {},
    ),
    "a scale per row": (
        "npu_quant_matmul",
        (ROWS, PACKED, COLUMNS),
        {"pertoken_scale": torch.ones(6), "output_dtype": BF16},
    ),
    "one scale for all rows": (
        "npu_quant_matmul",
        (ROWS, WEIGHT, COLUMNS),
        {"bias": torch.ones(40, dtype=torch.int32), "output_dtype": 15},  # 15: bfloat16
    ),
    "sums": ("npu_quant_matmul", (ROWS, PACKED, COLUMNS), {"output_dtype": torch.int32}),
    "packed": ("npu_format_cast", (WEIGHT, nz.FRACTAL_NZ), {}),
    "packed int4": ("npu_format_cast", (WEIGHT.view(torch.int32), nz.FRACTAL_NZ), {}),
    "not packed": ("npu_format_cast", (PACKED, nz.ND), {}),
}


def to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value


def shapes(result: Any) -> list[tuple[torch.Size, torch.dtype]]:
    results = [result] if isinstance(result, torch.Tensor) else result
    return [(tensor.shape, tensor.dtype) for tensor in results]


@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("version", ["torch", "compiled"])
def test_shapes_and_types_equal_those_of_the_kernels(
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


def test_a_cast_without_memory_is_as_opaque_as_a_real_one() -> None:
    plain = to_meta(WEIGHT)
    cast = meta.kernels()["npu_format_cast"]
    assert nz.is_nz(cast(plain, nz.FRACTAL_NZ))
    assert not nz.is_nz(cast(plain, nz.ND))
