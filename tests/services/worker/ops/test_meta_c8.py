"""Shape functions of the 8-bit operators in the forms that `test_meta.py` has no call for."""

import pytest
import torch

from services.worker.ops import meta

FLOAT8 = torch.float8_e4m3fn


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dst_type", [FLOAT8, 24], ids=["type", "number"])
def test_a_block_quantization_gives_the_type_that_is_asked_for(dst_type: object) -> None:
    lanes, scales = meta.kernels()["npu_dynamic_block_quant"](empty(3, 1, 512), dst_type=dst_type)
    assert (lanes.shape, lanes.dtype) == ((3, 1, 512), FLOAT8)
    assert (scales.shape, scales.dtype) == ((3, 1, 4), torch.float32)


def test_attention_takes_the_rotary_part_off_a_query() -> None:
    cache = empty(2, 128, 1, 656, dtype=FLOAT8)
    query, positions = empty(3, 4, 576), empty(3, 1, 16, dtype=torch.int32)
    result = meta.kernels()["npu_kv_quant_sparse_flash_attention"](
        query, cache, cache, positions, 0.1, 2, 2, layout_query="TND"
    )
    assert (result.shape, result.dtype) == ((3, 4, 512), torch.bfloat16)


def test_a_selection_is_as_wide_as_asked_for() -> None:
    scales = [empty(3, 8, dtype=torch.float32), empty(2, 128, 1, dtype=torch.float32)]
    eights = [empty(3, 8, 128, dtype=FLOAT8), empty(2, 128, 1, 128, dtype=FLOAT8)]
    result = meta.kernels()["npu_quant_lightning_indexer"](
        *eights, empty(3, 8), *scales, 0, 0, layout_query="TND", sparse_count=16
    )
    assert (result.shape, result.dtype) == ((3, 1, 16), torch.int32)
