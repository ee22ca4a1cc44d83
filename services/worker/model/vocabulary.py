"""Embeddings and logits over a vocabulary that tensor-parallel ranks share."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from services.worker.model.shards import Shard
from services.worker.model.slots import WeightSlot, matrix_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.stream import Stream


class Embedding:
    """One row per token; a rank holds the rows of its part of the vocabulary."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        size, hidden = spec.config.vocab_size, spec.config.hidden_size
        placement = spec.placement
        self._name = name
        self.part = Shard(
            name=name,
            size_out=size,
            size_in=hidden,
            rows=placement.share(size),
            columns=slice(0, hidden),
            target=slice(0, placement.largest_share(size)),
        )
        shape = (placement.largest_share(size), hidden)
        # Zeros: the last rank may hold rows of no token.
        self.weight = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def __call__(self, token_ids: Tensor, stream: Stream) -> Tensor:
        """[T] -> [T, E]; a rank's own rows of the vocabulary alone."""
        return functional.embedding(token_ids, self.weight)

    def slots(self) -> Iterator[WeightSlot]:
        """The rows of this rank."""
        count = self.part.rows.stop - self.part.rows.start
        yield matrix_slot(f"{self._name}.weight", self.weight[:count], self.part)


class ShardedEmbedding:
    """Each token's row comes from the one rank that has it; the others add zeros."""

    def __init__(self, part: Embedding) -> None:
        self.part = part
        self._rows = part.part.rows

    def __call__(self, token_ids: Tensor, stream: Stream) -> Tensor:
        """[T] -> [.., E] in the form of the stream."""
        local = token_ids - self._rows.start
        is_elsewhere = (local < 0) | (token_ids >= self._rows.stop)
        rows = self.part(local.masked_fill(is_elsewhere, 0), stream)
        return stream.add_up(rows.masked_fill_(is_elsewhere[:, None], 0))

    def slots(self) -> Iterator[WeightSlot]:
        """The rows of this rank."""
        return self.part.slots()


def make_embedding(spec: ModelSpec, name: str) -> Embedding | ShardedEmbedding:
    """The embedding of a rank."""
    part = Embedding(spec, name)
    return part if spec.placement.tp_size == 1 else ShardedEmbedding(part)


def whole_vocabulary(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """What makes [S, V] of the ranks' logits, each of the largest share of V."""
    group, size = spec.groups.tp, spec.config.vocab_size
    if group.size == 1:
        return _as_it_is

    def gather(logits: Tensor) -> Tensor:
        # Behind the last id there may be columns of no token.
        return group.all_gather(logits, dim=1)[:, :size]

    return gather


def _as_it_is(logits: Tensor) -> Tensor:
    return logits
