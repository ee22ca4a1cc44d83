"""Drives a decoder by hand: sequences with scattered blocks, steps of any mix."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker import kv_cache
from services.worker.loading.load import load_model
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.metadata import StepMetadata
from services.worker.model.rope import RotaryTables
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs

PLAIN = CacheFormat()


class Driver:
    """Holds the caches and the tokens computed so far of each sequence."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_len: int, seed: int = 0) -> None:
        self.decoder = decoder
        self.per_sequence = -(-max_len // 128)
        num_blocks = 1 + num_sequences * self.per_sequence
        self.caches = kv_cache.allocate(decoder.spec, num_blocks)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.table = order.view(num_sequences, self.per_sequence).to(torch.int32)
        self.computed = [0] * num_sequences

    def metadata(self, chunks: list[tuple[int, list[int]]], padding: int) -> StepMetadata:
        positions, slots, lens, seq_lens = [], [], [], []
        for sequence, tokens in chunks:
            start = self.computed[sequence]
            for position in range(start, start + len(tokens)):
                block = int(self.table[sequence, position // 128])
                positions.append(position)
                slots.append(block * 128 + position % 128)
            lens.append(len(tokens))
            seq_lens.append(start + len(tokens))
        table = self.table[[sequence for sequence, _ in chunks]]
        if padding:
            positions += [0] * padding
            slots += list(range(padding))
            lens.append(padding)
            seq_lens.append(0)
            table = torch.cat((table, torch.zeros_like(table[:1])))
        return StepMetadata(
            num_tokens=len(positions),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots, dtype=torch.int32),
            cum_query_lens=torch.tensor(lens).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=table.contiguous(),
        )

    def step(self, chunks: list[tuple[int, list[int]]], padding: int = 0) -> list[Tensor]:
        """Run one step; returns the logits of each chunk's tokens."""
        metadata = self.metadata(chunks, padding)
        ids = [token for _, tokens in chunks for token in tokens] + [0] * padding
        hidden = self.decoder.forward(torch.tensor(ids), metadata, self.caches)
        logits = self.decoder.compute_logits(hidden)
        for sequence, tokens in chunks:
            self.computed[sequence] += len(tokens)
        sizes = [len(tokens) for _, tokens in chunks] + ([padding] if padding else [])
        return list(logits.split(sizes))[: len(chunks)]

    def run(self, tokens: list[int], cuts: list[int], sequence: int = 0) -> Tensor:
        """Logits of a whole sequence, computed in chunks that end at `cuts`."""
        parts, start = [], 0
        for end in [*cuts, len(tokens)]:
            parts.append(self.step([(sequence, tokens[start:end])])[0])
            start = end
        return torch.cat(parts)


@pytest.fixture(autouse=True)
def oracle_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties of the oracle's top-k go to the lower position, as ours do.

    A key whose product with every indexer head is negative scores exactly 0, so ties are common
    with few heads; which of them wins is unspecified and would change the logits visibly.
    """

    def topk(self: Tensor, k: int, dim: int = -1, **_unused: Any) -> Any:
        ranked = torch.sort(self, dim=dim, descending=True, stable=True)
        best = slice(None, k)
        return torch.return_types.topk((ranked.values[..., best], ranked.indices[..., best]))

    monkeypatch.setattr(Tensor, "topk", topk)


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    def make(
        checkpoint: Any,
        *,
        dtype: torch.dtype = torch.float32,
        num_sequences: int = 1,
        max_len: int = 512,
        has_mtp: bool = False,
        cache: CacheFormat = PLAIN,
    ) -> Driver:
        config = ModelConfig.from_dir(checkpoint.path)
        device = torch.device("cpu")
        spec = ModelSpec(
            config=config, dtype=dtype, device=device, has_mtp=has_mtp, cache=cache
        )  # fmt: skip
        return Driver(load_model(checkpoint.path, spec), num_sequences, max_len)

    return make


@pytest.fixture
def config(tiny_values: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_dict(tiny_values)


@pytest.fixture
def spec(config: ModelConfig) -> ModelSpec:
    """The tiny model in float32 on a CPU."""
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def fill() -> Callable[[Iterable[WeightSlot]], dict[str, Tensor]]:
    """Fill slots with random tensors; returns what was stored, as a checkpoint holds it."""

    def run(slots: Iterable[WeightSlot]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(5)
        stored = {}
        for slot in slots:
            scale = slot.shape[-1] ** -0.5 if len(slot.shape) > 1 else 1.0
            stored[slot.name] = torch.randn(slot.shape, generator=generator) * scale
            slot.store(stored[slot.name])
        return stored

    return run


@pytest.fixture
def first_step() -> Callable[[int], tuple[StepInputs, kv_cache.LayerCache]]:
    """A prompt of one sequence in block 2, and empty caches of one layer."""

    def make(num_tokens: int) -> tuple[StepInputs, kv_cache.LayerCache]:
        tables = RotaryTables(
            dim=64, theta=1e4, max_positions=128, dtype=torch.float32, device=torch.device("cpu")
        )
        positions = torch.arange(num_tokens)
        step = StepMetadata(
            num_tokens=num_tokens,
            positions=positions,
            slot_mapping=(256 + positions).to(torch.int32),
            cum_query_lens=torch.tensor([num_tokens], dtype=torch.int32),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_table=torch.tensor([[2]], dtype=torch.int32),
        )
        latent, rope, indexer = (torch.zeros(3, 128, 1, width) for width in (512, 64, 128))
        cache = kv_cache.LayerCache(latent=latent, rope=rope, indexer=indexer)
        return StepInputs.prepare(step, tables), cache

    return make


@pytest.fixture
def random_tokens() -> Callable[..., list[int]]:
    def make(count: int, seed: int = 1, vocab: int = 97) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    return make
