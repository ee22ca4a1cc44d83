"""Which caches are in eight bits, and the types of each generation."""

import pytest
import torch

from services.worker.model.cache_format import CacheFormat, Generation

KEYS = CacheFormat(sparse_li_c8=True)


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
    cache = CacheFormat(sparse_sfa_c8=True)
    assert not cache.has_c8_keys(3, frozenset({3}))
    assert not cache.has_c8_keys(3, None)


def test_a_list_decides_and_without_one_all_keys_are_in_eight_bits() -> None:
    assert KEYS.has_c8_keys(3, None)
    assert KEYS.has_c8_keys(3, frozenset({3}))
    assert not KEYS.has_c8_keys(4, frozenset({3}))
    assert not KEYS.has_c8_keys(3, frozenset())
