import torch

from services.worker.dummy import dummy_step


def test_a_dummy_step_touches_the_scratch_block_only() -> None:
    token_ids, step = dummy_step(3, 300, torch.device("cpu"))
    assert len(token_ids) == step.num_tokens == 900
    assert step.slot_mapping.max() < 128
    assert not step.block_table.any()
    assert step.block_table.shape == (3, 3)
    assert step.cum_query_lens.tolist() == [300, 600, 900]
    assert step.seq_lens.tolist() == [300] * 3
    assert step.positions[299:302].tolist() == [299, 0, 1]
    dtypes = {step.slot_mapping.dtype, step.cum_query_lens.dtype, step.block_table.dtype}
    assert dtypes == {torch.int32}
