"""The published tables of cache bytes, number for number."""

import pytest
import torch

from services.worker.kv_cache import allocate, bytes_per_block
from services.worker.model.cache_format import CacheFormat, Generation
from services.worker.model.config import ModelConfig
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.sizing.kv import cache_bytes

GIB = 1 << 30
META = torch.device("meta")


def spec_of(
    config: ModelConfig,
    *,
    sfa: bool = False,
    li: bool = False,
    mtp: bool = True,
    generation: Generation = "a3",
    placement: Placement | None = None,
) -> ModelSpec:
    return ModelSpec(
        config=config,
        dtype=torch.bfloat16,
        device=META,
        placement=placement or Placement(),
        cache=CacheFormat(sparse_sfa_c8=sfa, sparse_li_c8=li, generation=generation),
        has_mtp=mtp,
    )


def test_78_layers_take_the_documented_bytes_per_token(glm: ModelConfig) -> None:
    assert cache_bytes(spec_of(glm, mtp=False)).per_token == 95_232
    assert cache_bytes(spec_of(glm, mtp=False, sfa=True, li=True)).per_token == 53_898


# Formats, bytes of latents and indexer keys per token, and GiB of one sequence per rank: 202,752
# tokens, then 1,048,576 tokens undivided, over 8 and over 16 ranks.
TABLE = [
    (False, False, 91_008, 5_632, (18.25, 94.38, 16.61, 11.05)),
    (False, True, 91_008, 2_860, (17.72, 91.67, 13.90, 8.35)),
    (True, False, 51_824, 5_632, (10.85, 56.11, 11.83, 8.66)),
    (True, True, 51_824, 2_860, (10.33, 53.40, 9.12, 5.96)),
]


@pytest.mark.parametrize(("sfa", "li", "latent", "indexer", "gib"), TABLE)
def test_79_layers_take_the_documented_bytes(
    glm: ModelConfig, sfa: bool, li: bool, latent: int, indexer: int, gib: tuple[float, ...]
) -> None:
    cases = zip(((202_752, 1), (1_048_576, 1), (1_048_576, 8), (1_048_576, 16)), gib, strict=True)
    for (length, ranks), expected in cases:
        cache = cache_bytes(spec_of(glm, sfa=sfa, li=li), ranks)
        assert (cache.latent, cache.indexer) == (latent, indexer)
        taken = cache.blocks_of(length) * cache.per_block / GIB
        # The table has two decimals.
        assert taken == pytest.approx(expected, abs=0.0051), (length, ranks)


@pytest.mark.parametrize(("ranks", "gib"), [(1, 52.15), (8, 8.91), (16, 5.82)])
def test_1024000_tokens_in_eight_bits(glm: ModelConfig, ranks: int, gib: float) -> None:
    cache = cache_bytes(spec_of(glm, sfa=True, li=True), ranks)
    # The table divides tokens, blocks are whole: at most one block more, 128 tokens x 16.
    exact = 1_024_000 * (cache.latent / ranks + cache.indexer) / GIB
    assert exact == pytest.approx(gib, abs=0.0051)
    taken = cache.blocks_of(1_024_000) * cache.per_block / GIB
    assert 0 <= taken - exact <= cache.per_block / GIB


def test_stages_of_41_and_37_layers_take_the_documented_bytes(glm: ModelConfig) -> None:
    stages = (Placement(last_layer=41), Placement(first_layer=41))
    caches = [cache_bytes(spec_of(glm, li=True, placement=stage)) for stage in stages]
    assert [cache.per_token for cache in caches] == [48_792, 45_076]


def test_a_row_has_the_documented_bytes(glm: ModelConfig) -> None:
    assert cache_bytes(spec_of(glm)).latent_row == 1152
    assert cache_bytes(spec_of(glm, sfa=True)).latent_row == 656
    for generation, row in (("a2", 130), ("a3", 130), ("a5", 132)):
        cache = cache_bytes(spec_of(glm, li=True, generation=generation))
        assert cache.indexer == 22 * row


def test_a_divided_block_covers_more_tokens_and_divides_latents_only(glm: ModelConfig) -> None:
    whole, divided = (cache_bytes(spec_of(glm), ranks) for ranks in (1, 8))
    assert divided.tokens_per_block == 8 * whole.tokens_per_block == 1024
    assert divided.per_block == 128 * 91_008 + 8 * 128 * 5_632
    assert divided.blocks_of(1025) == 2


@pytest.mark.parametrize("sfa", [False, True])
@pytest.mark.parametrize("li", [False, True])
@pytest.mark.parametrize("mtp", [False, True])
def test_bytes_of_a_block_are_those_a_worker_allocates(
    nano: ModelConfig, sfa: bool, li: bool, mtp: bool
) -> None:
    spec = spec_of(nano, sfa=sfa, li=li, mtp=mtp)
    caches = allocate(spec, 10)
    tensors = [
        tensor
        for layer in caches.layers
        for tensor in (layer.latent, layer.rope, layer.indexer, layer.indexer_scale)
        if tensor is not None
    ]
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert cache_bytes(spec).per_block * 10 == allocated == bytes_per_block(spec) * 10
