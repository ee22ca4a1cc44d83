"""What a token costs, the tensors that hold it, and what is refused in their place."""

import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.kv_cache import KVCaches, LayerCache
from services.worker.model.cache_format import CacheFormat, Generation
from services.worker.model.config import ModelConfig
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription

CPU = torch.device("cpu")
GIB = 1 << 30
SFA = CacheFormat(sparse_sfa_c8=True)
LI = CacheFormat(sparse_li_c8=True)
BOTH = CacheFormat(sparse_sfa_c8=True, sparse_li_c8=True)
LATENTS = (kv_cache.LATENT, kv_cache.ROPE, kv_cache.PACKED)


@pytest.fixture
def release(tiny_values: dict[str, Any]) -> ModelSpec:
    """The layer pattern of GLM-5.2."""
    del tiny_values["indexer_types"]
    config = ModelConfig.from_dict(
        tiny_values
        | {
            "num_hidden_layers": 78,
            "num_nextn_predict_layers": 1,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        }
    )
    return ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"))


@pytest.fixture
def tiny(tiny_values: dict[str, Any]) -> ModelSpec:
    """Full and shared layers in turn, four of them."""
    return ModelSpec(config=ModelConfig.from_dict(tiny_values), dtype=torch.float32, device=CPU)


def bytes_of(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of a token's latents, and of its indexer keys."""
    groups = kv_cache.describe_cache_groups(spec)
    latent = sum(group.bytes_per_token for group in groups if group.name in LATENTS)
    return latent, sum(group.bytes_per_token for group in groups) - latent


@pytest.mark.parametrize(
    ("cache", "expected", "with_mtp"),
    [
        (CacheFormat(), 95_232, 96_640),
        (LI, 92_586, 93_868),
        (SFA, 56_544, 57_456),
        (BOTH, 53_898, 54_684),
    ],
)
def test_a_token_costs_what_the_release_states(
    release: ModelSpec, cache: CacheFormat, expected: int, with_mtp: int
) -> None:
    spec = replace(release, cache=cache)
    assert sum(bytes_of(spec)) == expected
    assert kv_cache.bytes_per_block(spec) == expected * 128
    drafting = replace(spec, has_mtp=True)
    assert sum(bytes_of(drafting)) == with_mtp
    assert kv_cache.bytes_per_block(drafting) == with_mtp * 128


@pytest.mark.parametrize(
    ("cache", "latent", "keys"),
    [
        (CacheFormat(), 1152, 256),
        (BOTH, 656, 130),
        (replace(BOTH, generation="a2"), 656, 130),
        (replace(BOTH, generation="a5"), 656, 132),
    ],
)
def test_a_token_of_one_layer_costs_its_row(
    release: ModelSpec, cache: CacheFormat, latent: int, keys: int
) -> None:
    assert bytes_of(replace(release, cache=cache)) == (78 * latent, 21 * keys)


@pytest.mark.parametrize(
    ("cache", "latent", "keys", "short", "long"),
    [
        (CacheFormat(), 91_008, 5_632, 18.25, (94.38, 16.61, 11.05)),
        (LI, 91_008, 2_860, 17.72, (91.67, 13.90, 8.35)),
        (SFA, 51_824, 5_632, 10.85, (56.11, 11.83, 8.66)),
        (BOTH, 51_824, 2_860, 10.33, (53.40, 9.12, 5.96)),
    ],
)
def test_a_sequence_takes_the_memory_of_the_published_table(
    release: ModelSpec,
    cache: CacheFormat,
    latent: int,
    keys: int,
    short: float,
    long: tuple[float, float, float],
) -> None:
    """79 latents, 22 keys; with latents over 1, 8 and 16 ranks, keys whole on each."""
    spec = replace(release, cache=cache, has_mtp=True)
    assert bytes_of(spec) == (latent, keys)
    assert (latent + keys) * 202_752 / GIB == pytest.approx(short, abs=0.005)
    for ranks, expected in zip((1, 8, 16), long, strict=True):
        # The table's last digit is cut in places, so up to one of it.
        assert (latent / ranks + keys) * 1_048_576 / GIB == pytest.approx(expected, abs=0.01)


def test_a_million_tokens_in_eight_bits_take_what_is_published(release: ModelSpec) -> None:
    latent, keys = bytes_of(replace(release, cache=BOTH, has_mtp=True))
    for ranks, expected in ((1, 52.15), (8, 8.91), (16, 5.82)):
        assert (latent / ranks + keys) * 1_024_000 / GIB == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("cache", "latent", "keys"), [(CacheFormat(), 147_456, 32_768), (BOTH, 83_968, 16_640)]
)
def test_a_block_of_one_layer_takes_what_is_published(
    release: ModelSpec, cache: CacheFormat, latent: int, keys: int
) -> None:
    one = replace(release, cache=cache, placement=Placement(first_layer=0, last_layer=1))
    assert bytes_of(one) == (latent // 128, keys // 128)
    assert kv_cache.bytes_per_block(one) == latent + keys


def test_pipeline_stages_divide_the_bytes(release: ModelSpec) -> None:
    spec = replace(release, cache=LI, has_mtp=True)
    stages = [
        replace(spec, placement=Placement(first_layer=first, last_layer=last))
        for first, last in pairwise((0, 41, 78))
    ]
    assert [sum(bytes_of(stage)) for stage in stages] == [48_792, 45_076]
    assert [len(kv_cache.cached_layers(stage)) for stage in stages] == [41, 38]


def test_only_layers_with_an_indexer_have_its_cache(tiny: ModelSpec) -> None:
    caches = kv_cache.allocate(tiny, 5)
    assert [layer.indexer is not None for layer in caches.layers] == [True, False, True, False]
    first = caches.layers[0]
    assert first.latent.shape == (5, 128, 1, 512)
    assert first.rope is not None
    assert first.rope.shape == (5, 128, 1, 64)
    assert first.indexer is not None
    assert first.indexer.shape == (5, 128, 1, 128)
    assert first.indexer_scale is None


@pytest.mark.parametrize(
    ("generation", "eight", "scale"),
    [
        ("a2", torch.int8, torch.float16),
        ("a3", torch.int8, torch.float16),
        ("a5", torch.float8_e4m3fn, torch.float32),
    ],
)
def test_eight_bit_caches_have_the_devices_types(
    tiny: ModelSpec, generation: Generation, eight: torch.dtype, scale: torch.dtype
) -> None:
    spec = replace(tiny, cache=replace(BOTH, generation=generation))
    first, second, *_ = kv_cache.allocate(spec, 3).layers
    for layer in (first, second):
        assert (layer.latent.shape, layer.latent.dtype) == ((3, 128, 1, 656), eight)
        assert layer.rope is None
    assert first.indexer is not None
    assert (first.indexer.shape, first.indexer.dtype) == ((3, 128, 1, 128), eight)
    assert first.indexer_scale is not None
    assert (first.indexer_scale.shape, first.indexer_scale.dtype) == ((3, 128, 1, 1), scale)
    assert second.indexer is None
    assert second.indexer_scale is None


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({}, [0, 2, 4]),
        ({"model.layers.2.self_attn.wq_b.weight": "INT8_DYNAMIC"}, [0, 2, 4]),
        ({"model.layers.2.self_attn.indexer.quant_type": "INT8_DYNAMIC"}, [2]),
        ({"model.layers.0.self_attn.indexer.wq_b_weight": "W8A8_MXFP8"}, [0]),
        (
            {
                "model.layers.0.self_attn.indexer.quant_type": "FLOAT",
                "model.layers.4.self_attn.indexer.quant_type": "INT8_DYNAMIC",
            },
            [4],
        ),
        ({"model.layers.0.self_attn.indexer.quant_type": "FLOAT"}, []),
    ],
)
def test_a_description_may_name_the_layers_with_eight_bit_keys(
    tiny_values: dict[str, Any], types: dict[str, str], expected: list[int]
) -> None:
    """Layers 0 and 2 have an indexer, and the MTP layer 4."""
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    spec = ModelSpec(
        config=config,
        dtype=torch.bfloat16,
        device=CPU,
        quantization=QuantDescription(source="description", types=types),
        cache=LI,
        has_mtp=True,
    )
    layers = kv_cache.allocate(spec, 2).layers
    assert [at for at, one in enumerate(layers) if one.indexer_scale is not None] == expected
    assert [at for at, one in enumerate(layers) if one.indexer is not None] == [0, 2, 4]
    plain = [one.indexer for at, one in enumerate(layers) if at in {0, 2, 4} - set(expected)]
    assert all(keys is not None and keys.dtype == torch.bfloat16 for keys in plain)
    # Without the flag a description changes nothing.
    off = replace(spec, cache=CacheFormat())
    assert all(one.indexer_scale is None for one in kv_cache.allocate(off, 2).layers)


@pytest.mark.parametrize("cache", [CacheFormat(), LI, SFA, BOTH, replace(BOTH, generation="a5")])
def test_the_caches_take_the_bytes_that_were_promised(
    tiny_values: dict[str, Any], cache: CacheFormat
) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    spec = ModelSpec(
        config=config, dtype=torch.bfloat16, device=CPU, cache=cache, has_mtp=True
    )  # fmt: skip
    caches = kv_cache.allocate(spec, 3)
    tensors = [
        tensor
        for layer in caches.layers
        for tensor in (layer.latent, layer.rope, layer.indexer, layer.indexer_scale)
        if tensor is not None
    ]
    assert sum(tensor.nbytes for tensor in tensors) == 3 * kv_cache.bytes_per_block(spec)
    assert all(tensor.view(torch.int8).count_nonzero() == 0 for tensor in tensors)
    assert len(caches.layers) == 5
    kv_cache.check_layout(spec, caches)


def with_layer(caches: KVCaches, at: int, **changes: Any) -> KVCaches:
    layers = list(caches.layers)
    layers[at] = replace(layers[at], **changes)
    return replace(caches, layers=tuple(layers))


def sliced(cache: LayerCache) -> torch.Tensor:
    return torch.cat((cache.latent, cache.latent), -1)[..., :656]


@pytest.mark.parametrize(
    ("at", "changes", "reason"),
    [
        (1, {"latent": torch.zeros(3, 128, 1, 512)}, r"layer 1: latent is \(3, 128, 1, 512\)"),
        (0, {"latent": torch.zeros(3, 128, 1, 656)}, r"latent is torch\.float32, must be torch\.i"),
        (2, {"latent": None}, "layer 2: latent is missing: must be a packed latent cache"),
        (3, {"rope": torch.zeros(3, 128, 1, 64)}, "layer 3: rope is there, and the layer has none"),
        (0, {"indexer": None}, "layer 0: indexer is missing: must be a 8-bit indexer key cache"),
        (1, {"indexer": torch.zeros(3, 128, 1, 128)}, "layer 1: indexer is there"),
        (2, {"indexer_scale": None}, "layer 2: indexer_scale is missing"),
        (2, {"indexer_scale": torch.zeros(3, 128, 1, 1)}, r"must be torch\.float16"),
        (2, {"latent": torch.zeros(2, 128, 1, 656, dtype=torch.int8)}, r"must be \(3, 128, 1, 656"),
        (0, {"latent": torch.zeros(3, 128, 1, 656, dtype=torch.int8, device="meta")}, "on meta"),
    ],
)
def test_another_layout_is_refused_by_layer_and_tensor(
    tiny: ModelSpec, at: int, changes: dict[str, Any], reason: str
) -> None:
    from shared.errors import ConfigError

    spec = replace(tiny, cache=BOTH)
    caches = kv_cache.allocate(spec, 3)
    with pytest.raises(ConfigError, match=f"KV cache of .*{reason}"):
        kv_cache.check_layout(spec, with_layer(caches, at, **changes))


def test_rows_that_lie_apart_and_missing_layers_are_refused(tiny: ModelSpec) -> None:
    from shared.errors import ConfigError

    spec = replace(tiny, cache=BOTH)
    caches = kv_cache.allocate(spec, 3)
    apart = with_layer(caches, 1, latent=sliced(caches.layers[1]))
    with pytest.raises(ConfigError, match="layer 1: latent has strides"):
        kv_cache.check_layout(spec, apart)
    with pytest.raises(ConfigError, match="of 3 layers, must be of 4: layers 0 to 3"):
        kv_cache.check_layout(spec, replace(caches, layers=caches.layers[:3]))


def test_a_stages_layers_keep_their_numbers_in_messages(tiny: ModelSpec) -> None:
    from shared.errors import ConfigError

    spec = replace(tiny, placement=Placement(first_layer=2))
    caches = kv_cache.allocate(spec, 3)
    assert [one.indexer is not None for one in caches.layers] == [True, False]
    with pytest.raises(ConfigError, match="KV cache of layer 3: rope is missing"):
        kv_cache.check_layout(spec, with_layer(caches, 1, rope=None))


def test_caches_are_zero_aligned_and_take_memory_only_when_used(tiny: ModelSpec) -> None:
    spec = replace(tiny, dtype=torch.bfloat16)
    num_blocks = (512 << 20) // kv_cache.bytes_per_block(spec)
    before = _resident_bytes()
    caches = kv_cache.allocate(spec, num_blocks)
    assert _resident_bytes() - before < 64 << 20
    latent = caches.layers[0].latent
    assert latent.data_ptr() % 64 == 0
    assert not latent[-1].any()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
