"""Steps that belong to no sequence: they read and write the scratch block only."""

import torch
from torch import Tensor

from services.worker.model.config import BLOCK_SIZE
from services.worker.model.metadata import StepMetadata


def dummy_step(
    num_seqs: int, tokens_per_seq: int, device: torch.device
) -> tuple[Tensor, StepMetadata]:
    """`num_seqs` sequences of `tokens_per_seq` new tokens, token id 0 everywhere."""
    num_tokens = num_seqs * tokens_per_seq
    positions = torch.arange(num_tokens, device=device) % tokens_per_seq
    lengths = torch.full((num_seqs,), tokens_per_seq, dtype=torch.int32, device=device)
    num_blocks = -(-tokens_per_seq // BLOCK_SIZE)
    metadata = StepMetadata(
        num_tokens=num_tokens,
        positions=positions,
        slot_mapping=(positions % BLOCK_SIZE).to(torch.int32),
        cum_query_lens=torch.cumsum(lengths, 0, dtype=torch.int32),
        seq_lens=lengths,
        block_table=torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device),
    )
    return torch.zeros(num_tokens, dtype=torch.int64, device=device), metadata
