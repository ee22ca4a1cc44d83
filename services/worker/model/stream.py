"""The stream of a step: what one block leaves to the next, whole on every rank or cut by tokens.

A stream that is whole is added up by an all-reduce. One that is cut (flashcomm) has a rank's share
of the tokens from one block to the next: a reduce-scatter adds up what ranks computed in parts, and
an all-gather brings the tokens together where a block needs all of them. Norms see the share alone.
Shares are equal; behind the last token they are padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from services.worker.model.config import ModelConfig
from services.worker.model.placement import Placement
from services.worker.parallel.groups import Group, OneRank

_MIN_DENSE_TOKENS: Final = 1001
"""vLLM-Ascend cuts every step of a model with experts, and of others those above 1000 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShare:
    """One rank's rows among those of a step."""

    num_rows: int
    size: int = 1
    rank: int = 0

    @property
    def part(self) -> int:
        """Rows of every rank, padding included."""
        return -(-self.num_rows // self.size)

    @property
    def padded(self) -> int:
        """Rows of all ranks, padding included."""
        return self.part * self.size

    @property
    def rows(self) -> slice:
        """This rank's rows in the step; the last ranks may have fewer or none."""
        first = self.rank * self.part
        return slice(min(self.num_rows, first), min(self.num_rows, first + self.part))

    @property
    def count(self) -> int:
        """Rows of this rank that are not padding."""
        rows = self.rows
        count: int = rows.stop - rows.start
        return count

    def of(self, x: Tensor) -> Tensor:
        """This rank's part of all rows, with zeros behind them."""
        return padded_rows(x[self.rows], self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The stream of one step on one rank."""

    share: RowShare
    group: Group
    """The tensor-parallel ranks."""
    is_cut: bool = False

    @classmethod
    def alone(cls, num_tokens: int) -> Stream:
        """Of a rank that shares nothing."""
        return cls(share=RowShare(num_rows=num_tokens), group=OneRank("tp"))

    @property
    def num_rows(self) -> int:
        """Rows that it has on this rank."""
        return self.share.part if self.is_cut else self.share.num_rows

    def cut(self, x: Tensor) -> Tensor:
        """Rows of all tokens in the form of the stream."""
        return self.share.of(x) if self.is_cut else x

    def own(self, x: Tensor) -> Tensor:
        """This rank's share of what is in the form of the stream."""
        return x if self.is_cut else self.share.of(x)

    def whole(self, x: Tensor) -> Tensor:
        """All tokens of what is in the form of the stream."""
        return self.group.all_gather(x)[: self.share.num_rows] if self.is_cut else x

    def add_up(self, x: Tensor) -> Tensor:
        """The ranks' parts of a sum, in the form of the stream.

        Args:
            x: [T, E] of all tokens, with padding behind them or not; may be overwritten.
        """
        if self.is_cut:
            return self.group.reduce_scatter(padded_rows(x, self.share.padded))
        return self.group.all_reduce(x[: self.share.num_rows])


def padded_rows(x: Tensor, count: int, value: int = 0) -> Tensor:
    """`x` with rows of `value` behind it, `count` in all."""
    if len(x) == count:
        return x
    shape = (count, *x.shape[1:])
    rows = x.new_full(shape, value) if value else x.new_zeros(shape)
    rows[: len(x)] = x
    return rows


def cuts_stream(config: ModelConfig, placement: Placement, num_tokens: int) -> bool:
    """Whether the stream of a step is cut: the same on all ranks of a replica.

    All replicas of an expert-parallel world have experts, so there it depends on no token count.
    """
    if not placement.is_flashcomm:
        return False
    num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
    return any(map(config.is_sparse, range(num_layers))) or num_tokens >= _MIN_DENSE_TOKENS
