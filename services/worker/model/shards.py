"""A product's checkpoint matrices and the part of each that one rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from services.worker.model.placement import Placement


class Cut(Enum):
    """How a product is divided over the tensor-parallel ranks."""

    WHOLE = "whole"
    """Every rank computes all of it."""
    OUTPUTS = "outputs"
    """Each rank computes some of the outputs (column parallel)."""
    INPUTS = "inputs"
    """Each rank multiplies some of the inputs; the ranks' results must be added (row parallel)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One checkpoint matrix [out, in] of a product."""

    name: str
    size_out: int
    size_in: int
    rows: slice
    """Outputs kept by this rank."""
    columns: slice
    """Inputs kept by this rank."""
    target: slice
    """Where its outputs lie among those of the rank's product."""

    @classmethod
    def whole(cls, name: str, size_out: int, size_in: int) -> Shard:
        """A matrix that every rank keeps all of."""
        outputs = slice(0, size_out)
        return cls(
            name=name,
            size_out=size_out,
            size_in=size_in,
            rows=outputs,
            columns=slice(0, size_in),
            target=outputs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The matrices that are computed as one product on a rank, side by side."""

    prefix: str
    parts: tuple[Shard, ...]
    size_in: int
    """Inputs of the rank's product."""
    size_out: int
    """Outputs of the rank's product; the same on all ranks, so more than are kept where the outputs
    do not divide."""
    adds_bias: bool
    """Whether this rank adds what must be added once in a sum over ranks."""

    @classmethod
    def cut(
        cls, placement: Placement, prefix: str, parts: Mapping[str, int], size_in: int, cut: Cut
    ) -> Shards:
        """Divide matrices that share their input.

        Args:
            placement: The rank.
            prefix: Start of the checkpoint names, with its dot.
            parts: Outputs of each matrix by name, in the order of the product.
            size_in: Their inputs.
            cut: What is divided.
        """
        columns = placement.share(size_in) if cut is Cut.INPUTS else slice(0, size_in)
        shards, first = [], 0
        for name, size_out in parts.items():
            rows = placement.share(size_out) if cut is Cut.OUTPUTS else slice(0, size_out)
            target = slice(first, first + rows.stop - rows.start)
            first += placement.largest_share(size_out) if cut is Cut.OUTPUTS else size_out
            shards.append(
                Shard(
                    name=name,
                    size_out=size_out,
                    size_in=size_in,
                    rows=rows,
                    columns=columns,
                    target=target,
                )
            )
        return cls(
            prefix=prefix,
            parts=tuple(shards),
            size_in=columns.stop - columns.start,
            size_out=first,
            adds_bias=cut is not Cut.INPUTS or placement.tp_rank == 0,
        )

    @property
    def is_padded(self) -> bool:
        """Whether the product has outputs that no matrix fills."""
        filled: int = sum(part.target.stop - part.target.start for part in self.parts)
        return self.size_out > filled

    def names(self) -> tuple[str, ...]:
        """Names of the matrices behind the prefix."""
        return tuple(part.name for part in self.parts)

    def named(self) -> Iterator[tuple[str, Shard]]:
        """Each matrix with the start of its tensors' names, dot included."""
        for part in self.parts:
            yield f"{self.prefix}{part.name}.", part
