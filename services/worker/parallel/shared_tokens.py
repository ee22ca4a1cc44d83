"""Tokens of a replica of several ranks: one samples, all are told, one answers.

The rank that samples is the first of the last pipeline stage, where the head is. The rank that
answers leads the replica; with pipeline stages the two differ, and what the scheduler asked about
likelihoods is sent from the one to the other.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.worker.parallel.groups import Group
from services.worker.parallel.topology import Topology
from services.worker.plan import Ints, LogprobColumns
from services.worker.sampler import Sampled, sample
from services.worker.sampling_rows import SamplingRows

_LEADER = 0


class SharedTokens:
    """A `TokenSource` on every rank of a replica; all call it alike."""

    def __init__(self, group: Group, topology: Topology) -> None:
        """`group` is all of the replica, over host memory."""
        self._group = group
        self._source = (topology.pipeline_parallel_size - 1) * topology.tensor_parallel_size
        self._is_source = group.rank == self._source

    @property
    def is_sampling(self) -> bool:
        """Whether this rank samples for all."""
        return self._is_source

    def sample(
        self,
        logits: Tensor | None,
        settings: SamplingRows,
        rows: Ints,
        num_outputs: Ints,
        num_logprobs: Ints,
        drafts_of: Callable[[int], Ints] | None = None,
    ) -> Sampled:
        """Sample on one rank, and tell the others tokens and which rows have none, and why."""
        told = torch.empty((2, len(rows)), dtype=torch.int64)
        columns = None
        if self._is_source:
            assert logits is not None
            found = sample(logits, settings, rows, num_outputs, num_logprobs, drafts_of)
            told[0] = torch.from_numpy(found.tokens)
            told[1] = torch.from_numpy(found.is_finite + 2 * found.is_stuck)
            columns = found.logprobs
        self._group.broadcast(told, self._source)
        tokens, state = told[0].numpy(), told[1].numpy()
        is_finite, is_stuck = (state & 1).astype(np.bool_), (state & 2).astype(np.bool_)
        if ((num_logprobs >= 0) & is_finite).any():
            columns = self._deliver(columns)
        return Sampled(tokens=tokens, is_finite=is_finite, logprobs=columns, is_stuck=is_stuck)

    def measure(self, make: Callable[[], LogprobColumns]) -> LogprobColumns | None:
        """Make columns where the logits are, for the leader."""
        return self._deliver(make() if self._is_source else None)

    def share(self, drafts: Ints) -> Ints:
        """Everyone takes what the sampling rank has."""
        told = torch.from_numpy(np.ascontiguousarray(drafts))
        return np.asarray(self._group.broadcast(told, self._source).numpy())

    def _deliver(self, columns: LogprobColumns | None) -> LogprobColumns | None:
        """From the rank that samples to the one that answers."""
        if self._source == _LEADER:
            return columns
        if self._is_source:
            assert columns is not None
            data = _pack(columns)
            self._group.send(torch.tensor([len(data)]), _LEADER)
            self._group.send(torch.frombuffer(data, dtype=torch.uint8), _LEADER)
            return None
        if self._group.rank != _LEADER:
            return None
        size = int(self._group.receive(torch.empty(1, dtype=torch.int64), self._source))
        packed = self._group.receive(torch.empty(size, dtype=torch.uint8), self._source)
        return _unpack(packed.numpy().tobytes())


def _pack(columns: LogprobColumns) -> bytearray:
    """The columns' bytes behind two counts: tokens, and alternatives of all of them."""
    counts = np.array([len(columns.sampled_ranks), len(columns.top_token_ids)], np.int64)
    parts = (
        counts,
        columns.sampled_logprobs.astype(np.float32),
        columns.sampled_ranks.astype(np.uint32),
        columns.num_top_logprobs.astype(np.int64),
        columns.top_token_ids.astype(np.uint32),
        columns.top_logprobs.astype(np.float32),
    )
    return bytearray(b"".join(part.tobytes() for part in parts))


def _unpack(data: bytes) -> LogprobColumns:
    tokens, alternatives = np.frombuffer(data, np.int64, 2).tolist()
    at = 16

    def take(dtype: type[np.generic], count: int) -> np.ndarray:
        nonlocal at
        part = np.frombuffer(data, dtype, count, at)
        at += part.nbytes
        return part

    return LogprobColumns(
        sampled_logprobs=take(np.float32, tokens),
        sampled_ranks=take(np.uint32, tokens),
        num_top_logprobs=take(np.int64, tokens),
        top_token_ids=take(np.uint32, alternatives),
        top_logprobs=take(np.float32, alternatives),
    )
