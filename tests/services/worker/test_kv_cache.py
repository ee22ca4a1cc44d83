"""What a token costs, and the tensors that hold it."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.model.config import ModelConfig


@pytest.fixture
def release(tiny_values: dict[str, Any]) -> ModelConfig:
    """The layer pattern of GLM-5.2."""
    del tiny_values["indexer_types"]
    return ModelConfig.from_dict(
        tiny_values
        | {
            "num_hidden_layers": 78,
            "num_nextn_predict_layers": 1,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
        }
    )


@pytest.mark.parametrize(("with_mtp", "expected"), [(False, 95_232), (True, 96_640)])
def test_a_token_costs_what_the_release_states(
    release: ModelConfig, with_mtp: bool, expected: int
) -> None:
    groups = kv_cache.describe_cache_groups(release, torch.bfloat16, with_mtp=with_mtp)
    assert sum(group.bytes_per_token for group in groups) == expected
    assert kv_cache.bytes_per_block(release, torch.bfloat16, with_mtp=with_mtp) == expected * 128


def test_only_layers_with_an_indexer_have_its_cache(tiny_values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny_values)
    caches = kv_cache.allocate(config, 5, torch.float32, "cpu")
    assert [layer.indexer is not None for layer in caches.layers] == [True, False, True, False]
    assert caches.layers[0].latent.shape == (5, 128, 1, 512)
    assert caches.layers[0].rope.shape == (5, 128, 1, 64)
    assert caches.layers[0].indexer is not None
    assert caches.layers[0].indexer.shape == (5, 128, 1, 128)


def test_the_caches_take_the_bytes_that_were_promised(tiny_values: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    caches = kv_cache.allocate(config, 3, torch.bfloat16, "cpu", with_mtp=True)
    tensors = [
        tensor
        for layer in caches.layers
        for tensor in (layer.latent, layer.rope, layer.indexer)
        if tensor is not None
    ]
    promised = 3 * kv_cache.bytes_per_block(config, torch.bfloat16, with_mtp=True)
    assert sum(tensor.nbytes for tensor in tensors) == promised
    assert len(caches.layers) == 5


def test_scratch_rows_start_finite(tiny_values: dict[str, Any]) -> None:
    caches = kv_cache.allocate(ModelConfig.from_dict(tiny_values), 2, torch.bfloat16, "cpu")
    assert all(layer.latent.count_nonzero() == 0 for layer in caches.layers)


def test_caches_are_zero_aligned_and_take_memory_only_when_used(
    tiny_values: dict[str, Any],
) -> None:
    config = ModelConfig.from_dict(tiny_values)
    block = kv_cache.bytes_per_block(config, torch.bfloat16)
    num_blocks = (512 << 20) // block
    before = _resident_bytes()
    caches = kv_cache.allocate(config, num_blocks, torch.bfloat16, "cpu")
    assert _resident_bytes() - before < 64 << 20
    latent = caches.layers[0].latent
    assert latent.data_ptr() % 64 == 0
    assert not latent[-1].any()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
