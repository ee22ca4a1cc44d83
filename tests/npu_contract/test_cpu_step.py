"""glm-nano computes on our CPU kernels behind the wheel's true schemas, in every form."""

from dataclasses import replace

import pytest
import torch

from services.worker import kv_cache
from services.worker.loading.load import load_model
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.metadata import StepMetadata
from services.worker.model.spec import ModelSpec
from tests.services.worker.model.hostile import random_weight
from tools.npu_contract.environment import ROOT
from tools.npu_contract.variants import Variant, Weights

NANO = ROOT / "models" / "glm-nano"
NUM_TOKENS = 150  # more than index_topk: some rows need a selection
PLAIN = ModelSpec(
    config=ModelConfig.from_dir(NANO), dtype=torch.float32, device=torch.device("cpu")
)


def run_chunk(
    nano: Decoder, caches: kv_cache.KVCaches, ids: torch.Tensor, start: int
) -> torch.Tensor:
    positions = torch.arange(start, start + len(ids))
    step = StepMetadata(
        num_tokens=len(ids),
        positions=positions,
        slot_mapping=(positions + 128).to(torch.int32),
        cum_query_lens=torch.tensor([len(ids)], dtype=torch.int32),
        seq_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
    )
    return nano.compute_logits(nano.forward(ids, step, caches))


def whole_and_in_pieces(nano: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, nano.config.vocab_size, (NUM_TOKENS,), generator=generator)
    whole = run_chunk(nano, kv_cache.allocate(nano.spec, 3), ids, 0)
    caches = kv_cache.allocate(nano.spec, 3)
    pieces = [run_chunk(nano, caches, ids[:140], 0)]
    pieces += [run_chunk(nano, caches, ids[at : at + 1], at) for at in range(140, NUM_TOKENS)]
    return whole, torch.cat(pieces)


def test_a_prompt_in_one_step_equals_the_prompt_in_pieces() -> None:
    whole, pieces = whole_and_in_pieces(load_model(NANO, PLAIN))
    assert bool(whole.isfinite().all())
    # Sums of float32 in another order; logits are of size 10.
    torch.testing.assert_close(pieces, whole, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("caches", ["plain", "c8"])
@pytest.mark.parametrize("weights", ["bf16", "w8a8", "w8a8 dynamic", "w4a8"])
def test_so_it_does_with_quantized_weights_and_caches(weights: Weights, caches: str) -> None:
    form = CacheFormat(sparse_sfa_c8=caches == "c8", sparse_li_c8=caches == "c8")
    described = Variant(model="glm-nano", weights=weights).spec.quantization
    nano = Decoder.build(replace(PLAIN, quantization=described, cache=form))
    generator = torch.Generator().manual_seed(7)
    for slot in nano.slots():
        if 0 not in slot.kept_shape:
            slot.store(random_weight(slot, generator))
    nano.finish_loading()
    whole, pieces = whole_and_in_pieces(nano)
    assert bool(whole.isfinite().all())
    # Rows are quantized one by one, so only a sum on the edge between two steps may differ.
    assert (pieces - whole).abs().median() < 1e-3 * whole.std()
