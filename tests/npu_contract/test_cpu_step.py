"""glm-nano computes on our CPU kernels behind the wheel's true schemas."""

import pytest
import torch

from services.worker import kv_cache
from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.metadata import StepMetadata
from services.worker.model.spec import ModelSpec
from tools.npu_contract.environment import ROOT

NANO = ROOT / "models" / "glm-nano"
NUM_TOKENS = 150  # more than index_topk: some rows need a selection


@pytest.fixture(scope="module")
def nano() -> Decoder:
    config = ModelConfig.from_dir(NANO)
    spec = ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))
    return load_model(NANO, spec)


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


def test_a_prompt_in_one_step_equals_the_prompt_in_pieces(nano: Decoder) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, nano.config.vocab_size, (NUM_TOKENS,), generator=generator)
    whole = run_chunk(nano, kv_cache.allocate(nano.spec, 3), ids, 0)
    assert bool(whole.isfinite().all())
    caches = kv_cache.allocate(nano.spec, 3)
    pieces = [run_chunk(nano, caches, ids[:140], 0)]
    pieces += [run_chunk(nano, caches, ids[at : at + 1], at) for at in range(140, NUM_TOKENS)]
    # Sums of float32 in another order; logits are of size 10.
    torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-3, rtol=1e-3)
