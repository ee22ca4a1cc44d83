"""Which caches are in eight bits, and the types of each generation."""

import pytest
import torch

from services.worker.model.cache_format import CacheFormat, Generation

KEYS = CacheFormat(sparse_li_c8=True)
PREFIX = "model.layers.3.self_attn.indexer"


@pytest.mark.parametrize(
    ("generation", "rows", "scales", "weights"),
    [
        ("a2", torch.int8, torch.float16, torch.float16),
        ("a3", torch.int8, torch.float16, torch.float16),
        ("a5", torch.float8_e4m3fn, torch.float32, torch.bfloat16),
    ],
)
def test_types_are_those_of_the_generation(
    generation: Generation, rows: torch.dtype, scales: torch.dtype, weights: torch.dtype
) -> None:
    cache = CacheFormat(generation=generation)
    assert (cache.eight_bit_type, cache.key_scale_type) == (rows, scales)
    assert cache.head_weight_type == weights


def test_without_the_flag_no_keys_are_in_eight_bits() -> None:
    types = {f"{PREFIX}.quant_type": "INT8_DYNAMIC"}
    assert not CacheFormat(sparse_sfa_c8=True).has_c8_keys(3, types)


def test_without_a_list_all_keys_are_in_eight_bits() -> None:
    assert KEYS.has_c8_keys(3, {})
    assert KEYS.has_c8_keys(3, {f"{PREFIX}.wq_b.weight": "W8A8"})
    assert KEYS.has_c8_keys(3, {"indexer_quant_type": "INT8_DYNAMIC"})


@pytest.mark.parametrize("entry", ["quant_type", "wq_b_weight"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("INT8_DYNAMIC", True),
        ("QK_INT8_DYNAMIC", True),
        ("W8A8_MXFP8", True),
        ("FLOAT", False),
        ("W8A8_DYNAMIC", False),
    ],
)
def test_a_list_decides_by_its_values(entry: str, kind: str, expected: bool) -> None:
    types = {f"{PREFIX}.{entry}": kind}
    assert KEYS.has_c8_keys(3, types) is expected
    assert not KEYS.has_c8_keys(33, types)
    assert not KEYS.has_c8_keys(4, types)
