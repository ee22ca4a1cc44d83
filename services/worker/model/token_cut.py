"""Which tokens a rank attends for, and what it exchanges for that.

All tokens with its heads; or its share of the tokens with all heads (DSA-CP), so that the ranks
divide the work of a long prompt in which each token attends to thousands. The caches are complete
on every rank in both cases: ranks that cut tokens bring their rows together before they are
written. Before the output product, which is cut over heads, tokens are exchanged for heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.key_cache import KeyCache
from services.worker.model.latent_cache import LatentCache
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.parallel.groups import Group


class AttendedTokens(Protocol):
    """The tokens that a rank attends for."""

    def take(self, x: Tensor, step: StepInputs) -> Tensor:
        """Those tokens [T, E] of the stream."""
        ...

    def write(
        self,
        kv: Tensor,
        keys: Tensor | None,
        key_cache: KeyCache | None,
        step: StepInputs,
        cache: LayerCache,
    ) -> None:
        """Write what the step's tokens leave in the caches.

        Args:
            kv: [T, C + Dr] latents of the rank's tokens.
            keys: [T, Di] their indexer keys; None without an indexer.
            key_cache: How those are kept.
            step: The step.
            cache: The layer's caches, written.
        """
        ...

    def exchange(self, values: Tensor) -> Tensor:
        """What the rank's tokens attended to, as the output product takes it on this rank."""
        ...


def attended_tokens(spec: ModelSpec, latent_cache: LatentCache) -> AttendedTokens:
    """The tokens of the spec's rank."""
    if spec.placement.is_dsa_cp:
        return TokenShare(latent_cache, spec.groups.tp, spec.placement.tp_size)
    return AllTokens(latent_cache)


class AllTokens:
    """All tokens, with the rank's heads."""

    def __init__(self, latent_cache: LatentCache) -> None:
        self._latent_cache = latent_cache

    def take(self, x: Tensor, step: StepInputs) -> Tensor:
        """All of the stream."""
        return step.stream.whole(x)

    def write(
        self,
        kv: Tensor,
        keys: Tensor | None,
        key_cache: KeyCache | None,
        step: StepInputs,
        cache: LayerCache,
    ) -> None:
        """Write what is here."""
        self._latent_cache.write(kv, step, cache)
        if keys is not None:
            assert key_cache is not None
            key_cache.write(keys, step, cache)

    def exchange(self, values: Tensor) -> Tensor:
        """They are the rank's own: [T, H, D] -> [T, H * D]."""
        return values.flatten(1)


class TokenShare:
    """A share of the tokens, with all heads."""

    def __init__(self, latent_cache: LatentCache, group: Group, size: int) -> None:
        self._latent_cache = latent_cache
        self._group = group
        self._size = size

    def take(self, x: Tensor, step: StepInputs) -> Tensor:
        """This rank's share."""
        return step.stream.own(x)

    def write(
        self,
        kv: Tensor,
        keys: Tensor | None,
        key_cache: KeyCache | None,
        step: StepInputs,
        cache: LayerCache,
    ) -> None:
        """Bring finished rows of all ranks together in one exchange, then write them."""
        own = list(self._latent_cache.rows(kv, step))
        num_latent = len(own)
        if keys is not None:
            assert key_cache is not None
            own += key_cache.rows(keys)
        rows = gather_rows(self._group, own, step.stream.share.num_rows)
        self._latent_cache.store(rows[:num_latent], step.slots, cache)
        if key_cache is not None:
            key_cache.store(rows[num_latent:], step.slots, cache)

    def exchange(self, values: Tensor) -> Tensor:
        """Own tokens of all heads for all tokens of own heads: [T, H, D] -> [ranks * T, H' * D]."""
        num_rows = len(values)
        by_rank = values.view(num_rows, self._size, -1).unbind(1)
        sent = torch.stack(by_rank).flatten(0, 1)
        even = [num_rows] * self._size
        return self._group.all_to_all(sent, even, even)


def gather_rows(group: Group, rows: Sequence[Tensor], num_rows: int) -> list[Tensor]:
    """The members' rows behind each other, for several tensors at once.

    Args:
        group: All have as many rows.
        rows: Tensors [T, N] of any types; their bytes travel side by side.
        num_rows: Rows to keep; those behind them are padding.
    """
    parts = [part.view(torch.int8) for part in rows]
    side_by_side = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    gathered = group.all_gather(side_by_side)[:num_rows]
    found = gathered.split_with_sizes([part.shape[1] for part in parts], 1)
    return [part.contiguous().view(own.dtype) for part, own in zip(found, rows, strict=True)]
