"""Which blocks of a worker hold the start of which texts: found at admission, shared, not copied.

A block gets a name (`shared/block_hashes.py`) once it is full and the result that computed its last
token is here, so no name ever stands for tokens that are not computed, or for drafts. From then on
the pool keeps it, and whoever starts with the same tokens holds it as well instead of computing
it.

Laws
- A name stands for one block, and a block has one name; a second block of the same content stays
  without one. Tables never change: nobody's block is exchanged for another.
- The last token of a sequence is always computed, by its own row.
- What a plan in flight computes has no name yet; it is *coming*, and worth waiting for.
- After `clear` nothing that was computed before it is found again: who runs names nothing more.
"""

from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from itertools import islice
from typing import Final

from services.scheduler.block_pool import BlockPool
from services.scheduler.cache_events import CachedBlock, CacheLog
from services.scheduler.limits import Limits
from services.scheduler.sequence import Sequence
from shared.block_hashes import BlockHashes, root_hash
from shared.sampling import SamplingSpec

# Of a sequence that names nothing any more.
NEVER: Final = 1 << 62
# Losses that are remembered, so that what was found for a waiting sequence is not looked up anew.
_NUM_LOSSES_KEPT: Final = 4096
# Blocks that are hashed at a time where the next ones may not be found.
NUM_HASHED: Final = 8
# Blocks that are looked up or hashed ahead at a time: a tenth of a millisecond.
NUM_AHEAD: Final = 64


@dataclass(slots=True)
class CacheCounts:
    """Tokens of sequences looked up at their first admission, and those found."""

    num_queries: int = 0
    num_hits: int = 0


@dataclass(slots=True)
class Found:
    """What was found for a waiting sequence, and up to which loss that was so."""

    cache: "PrefixCache"
    blocks: list[int]
    num_losses: int


class PrefixCache:
    """Names of blocks of one epoch.

    Args:
        limits: Bounds of the epoch; whether anything is cached at all.
        log: Is told every change.
        replica: Number of the worker group, for the log.
    """

    def __init__(self, limits: Limits, log: CacheLog, replica: int) -> None:
        """Every block is free and without a name."""
        self.pool = BlockPool(limits.num_blocks, self._forget)
        self.counts = CacheCounts()
        self.is_enabled = limits.is_caching
        self._limits = limits
        self._log = log
        self._replica = replica
        self._blocks: dict[bytes, int] = {}
        # By block: its name and that of its parent.
        self._names: dict[int, tuple[bytes, bytes]] = {}
        self._coming: Counter[bytes] = Counter()
        self._losses: deque[int] = deque(maxlen=_NUM_LOSSES_KEPT)
        self._num_losses = 0
        self._num_stored = 0

    # -- looking up ----------------------------------------------------------------------------

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks that hold the longest known start of a waiting sequence.

        Looking up again costs what was lost since, however long the start is.
        """
        found = self._look_up(sequence, sequence.num_tokens)
        return [] if found is None else found.blocks

    def look_ahead(self, sequence: Sequence) -> bool:
        """Look up a part of what `find` will; whether there is more."""
        before = self._found(sequence)
        if before is None:
            return False
        num_before = len(before.blocks)
        found = self._look_up(sequence, NUM_AHEAD)
        return found is not None and len(found.blocks) == num_before + NUM_AHEAD

    def hash_ahead(self, sequence: Sequence, num_tokens: int) -> None:
        """Hash a part of what `announce` and `publish` will need up to these tokens."""
        if self.is_enabled and sequence.num_named_blocks != NEVER:
            hashes = self.hashes_of(sequence)
            num_blocks = min(num_tokens, sequence.num_tokens) // self._limits.block_size
            num_blocks = min(num_blocks, len(hashes.known) + NUM_AHEAD)
            hashes.extend(num_blocks, sequence.prompt_token_ids, sequence.output_token_ids)

    def is_coming(self, sequence: Sequence) -> bool:
        """Whether a plan in flight computes the block behind those that `find` found."""
        if not self._coming or sequence.found is None or sequence.hashes is None:
            return False
        index = len(sequence.found.blocks)
        num_blocks = (sequence.num_tokens - 1) // self._limits.block_size
        return index < num_blocks and sequence.hashes.known[index] in self._coming

    def names_of(self, sequence: Sequence) -> Iterator[bytes]:
        """Names of the blocks that a waiting sequence may share; hashed as far as they are read."""
        if not self.is_enabled or _reads_nothing(sequence.sampling):
            return
        hashes = self.hashes_of(sequence)
        num_blocks = (sequence.num_tokens - 1) // self._limits.block_size
        for index in range(num_blocks):
            if index == len(hashes.known):
                ahead = min(num_blocks, index + NUM_HASHED)
                hashes.extend(ahead, sequence.prompt_token_ids, sequence.output_token_ids)
            yield hashes.known[index]

    def hashes_of(self, sequence: Sequence) -> BlockHashes:
        """The names of a sequence's blocks, for this model."""
        root, size = self._root(sequence), self._limits.block_size
        hashes = sequence.hashes
        if hashes is None or hashes.root != root or hashes.block_size != size:
            hashes = sequence.hashes = BlockHashes(root, size)
        return hashes

    def count(self, sequence: Sequence, num_hit_tokens: int) -> None:
        """A sequence was admitted for the first time."""
        if self.is_enabled:
            self.counts.num_queries += sequence.num_tokens
            self.counts.num_hits += num_hit_tokens

    # -- naming --------------------------------------------------------------------------------

    def announce(self, sequence: Sequence, num_planned_tokens: int) -> list[bytes]:
        """A plan computes the tokens of a sequence up to here; the names that come of it.

        The caller gives them back to `settle` with the result of that plan.
        """
        num_blocks = num_planned_tokens // self._limits.block_size
        if not self.is_enabled or sequence.num_named_blocks >= num_blocks:
            return []
        hashes = self.hashes_of(sequence)
        hashes.extend(num_blocks, sequence.prompt_token_ids, sequence.output_token_ids)
        names = hashes.known[sequence.num_named_blocks : num_blocks]
        self._coming.update(names)
        return names

    def settle(self, names: ListOf[bytes]) -> None:
        """The result of a plan is here: what it computed has names, or will not come."""
        coming = self._coming
        for name in names:
            coming[name] -= 1
            if not coming[name]:
                del coming[name]

    def publish(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Results of the first tokens of a sequence are here: its full blocks get their names."""
        num_blocks = num_computed_tokens // self._limits.block_size
        first = sequence.num_named_blocks
        if first >= num_blocks or not self.is_enabled:
            return
        hashes = self.hashes_of(sequence)
        hashes.extend(num_blocks, sequence.prompt_token_ids, sequence.output_token_ids)
        known, names = self._blocks, hashes.known
        parent = names[first - 1] if first else hashes.root
        for name, block in zip(
            names[first:num_blocks], sequence.blocks[first:num_blocks], strict=True
        ):
            if name not in known:
                known[name] = block
                self._names[block] = (name, parent)
                self.pool.keep(block)
                self._num_stored += 1
                self._log.stored(self._replica, name, parent)
            parent = name
        sequence.num_named_blocks = num_blocks

    # -- forgetting ----------------------------------------------------------------------------

    def forget(self, blocks: ListOf[int]) -> None:
        """Nobody else may hold these blocks from now on: what is in them cannot be trusted."""
        named = [block for block in blocks if block in self._names]
        for block in named:
            self._forget(block)
        self.pool.drop(named)

    def distrust(self, sequence: Sequence) -> None:
        """What a running sequence computed is wrong: it names nothing, and what it named goes."""
        sequence.num_named_blocks = NEVER
        self.forget(sequence.blocks)

    def clear(self, running: ListOf[Sequence]) -> int:
        """Forget every block; what runs goes on and names nothing. Returns how many had a name."""
        for sequence in running:
            sequence.num_named_blocks = NEVER
        count = len(self._names)
        self.pool.drop(list(self._names))
        self._names.clear()
        self._blocks.clear()
        self._num_losses += _NUM_LOSSES_KEPT + 1
        self._log.cleared(self._replica)
        return count

    def close(self) -> None:
        """The epoch is over, and with it what its blocks held."""
        if self._names:
            self._log.cleared(self._replica)

    # -- state ---------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows with every change of what can be found."""
        return self._num_stored + self._num_losses

    @property
    def num_named(self) -> int:
        """Blocks that can be found, in use or not."""
        return len(self._names)

    def named_blocks(self) -> list[CachedBlock]:
        """All that can be found, parents first where both were named in this order."""
        return [
            CachedBlock(replica=self._replica, block=block, block_hash=name, parent_hash=parent)
            for block, (name, parent) in self._names.items()
        ]

    def check(self, num_in_flight: int) -> None:
        """Assert that names and blocks belong together; for tests."""
        assert len(self._blocks) == len(self._names), "a name without a block"
        for block, (name, _) in self._names.items():
            assert self._blocks[name] == block, "a block under another's name"
            assert self.pool.is_kept(block), "a named block is not kept"
        assert num_in_flight or not self._coming, "a name comes of no plan"

    def _root(self, sequence: Sequence) -> bytes:
        request, model = sequence.request, (self._limits.model_digest, self._limits.block_size)
        if request.cache_root is None or request.cache_root[0] != model:
            request.cache_root = (model, root_hash(*model, request.cache_salt))
        return request.cache_root[1]

    def _look_up(self, sequence: Sequence, most: int) -> Found | None:
        """Find up to `most` further blocks of a sequence."""
        found = self._found(sequence)
        if found is None:
            return None
        hashes, blocks, known = self.hashes_of(sequence), found.blocks, self._blocks
        num_blocks = (sequence.num_tokens - 1) // self._limits.block_size
        for index in range(len(blocks), min(num_blocks, len(blocks) + most)):
            if index == len(hashes.known):
                ahead = min(num_blocks, index + NUM_HASHED)
                hashes.extend(ahead, sequence.prompt_token_ids, sequence.output_token_ids)
            block = known.get(hashes.known[index])
            if block is None:
                break
            blocks.append(block)
        return found

    def _found(self, sequence: Sequence) -> Found | None:
        """What is known to be found for a sequence; None if it does not read the cache."""
        if not self.is_enabled or _reads_nothing(sequence.sampling):
            sequence.found = None
            return None
        found = sequence.found
        if found is None or found.cache is not self or not self._is_true(found):
            found = sequence.found = Found(self, [], self._num_losses)
        return found

    def _is_true(self, found: Found) -> bool:
        """Whether no block that was found has been lost since."""
        num_new = self._num_losses - found.num_losses
        if num_new > len(self._losses):
            return False
        if num_new:
            lost = set(islice(reversed(self._losses), num_new))
            if not lost.isdisjoint(found.blocks):
                return False
            found.num_losses = self._num_losses
        return True

    def _forget(self, block: int) -> None:
        name, _ = self._names.pop(block)
        del self._blocks[name]
        self._losses.append(block)
        self._num_losses += 1
        self._log.removed(self._replica, name)


def _reads_nothing(sampling: SamplingSpec) -> bool:
    """Whether a sequence has to compute its whole prompt."""
    return sampling.skip_reading_prefix_cache or sampling.num_prompt_logprobs is not None
