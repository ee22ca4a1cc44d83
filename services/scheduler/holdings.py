"""What the sequences of one epoch hold: rows and blocks, and what is still on its way back.

Law: a block returns to the pool after the result of the last plan that names its row; a row
returns after the result of the plan that announced it as freed. Until then neither is handed out.
"""

from collections.abc import Iterable

from services.scheduler.block_pool import BlockPool
from services.scheduler.limits import Limits
from services.scheduler.sequence import Sequence


class Holdings:
    """Rows and blocks of a worker group, counted for one epoch."""

    def __init__(self, limits: Limits, pool: BlockPool) -> None:
        """Everything is free, no step has a result."""
        self._limits = limits
        self._pool = pool
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        # Rows that the next plan announces as freed, then by the step that announced them.
        self._unannounced_rows: list[int] = []
        self._announced_rows: dict[int, list[int]] = {}
        # Blocks of sequences that left while a plan in flight names them, by that plan's step.
        self._deferred_blocks: dict[int, list[int]] = {}
        self.num_deferred = 0
        self.last_result_step = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self._pool.num_free

    @property
    def num_total_blocks(self) -> int:
        """Blocks that exist, the scratch block not counted."""
        return self._pool.num_total

    @property
    def has_free_row(self) -> bool:
        """Whether a sequence can be given a row."""
        return bool(self._free_rows)

    @property
    def has_ended_rows(self) -> bool:
        """Whether there are rows that the next plan announces as freed."""
        return bool(self._unannounced_rows)

    @property
    def has_only_ended_rows(self) -> bool:
        """Whether no row is free, nor will be before a plan says which have ended.

        Plans sent ahead may use up all rows. If all of those end there, whoever waits for a row has
        no part in a plan, and nobody else has: one without rows must say it.
        """
        return bool(self._unannounced_rows) and not (self._free_rows or self._announced_rows)

    def take_row(self) -> int:
        """Hand out a row."""
        return self._free_rows.pop()

    def num_taken_by(self, cached: list[int], count: int) -> int:
        """Free blocks that go to a sequence with `cached` blocks and `count` new ones."""
        return count + self._pool.num_idle_among(cached)

    def share_blocks(self, sequence: Sequence, cached: list[int]) -> None:
        """Begin the table of a sequence with blocks that hold its start already."""
        self._pool.hold(cached)
        sequence.blocks = list(cached)

    def needed_blocks(self, sequence: Sequence) -> tuple[int, bool]:
        """Blocks to take now, and whether the sequence surely cannot go on without them.

        Room for drafts is taken where it is free. Otherwise there must be room for the next token,
        wherever the plan in flight leaves the sequence; its result tells where that is.
        """
        limits, last = self._limits, sequence.total_limit - 1
        num_positions = max(sequence.num_planned_tokens + 1, sequence.num_tokens)
        num_blocks = len(sequence.blocks)
        most = min(num_positions + limits.num_lookahead_tokens, last)
        needed = limits.blocks_for(most) - num_blocks
        if needed <= self.num_free_blocks or not limits.num_speculative_tokens:
            return needed, True
        is_in_flight = self.is_in_flight(sequence)
        if is_in_flight:
            num_positions = min(num_positions + limits.num_speculative_tokens, last)
        return limits.blocks_for(num_positions) - num_blocks, not is_in_flight

    def take_blocks(self, sequence: Sequence, count: int) -> None:
        """Append `count` blocks to the table of a sequence."""
        sequence.blocks += self._pool.allocate(count)

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Whether a plan without a result names the sequence."""
        return sequence.last_step > self.last_result_step

    def release(self, sequence: Sequence) -> None:
        """Take row and blocks of a sequence that leaves; each becomes free when it is safe."""
        self._unannounced_rows.append(sequence.row)
        blocks, sequence.blocks = sequence.blocks, []
        if self.is_in_flight(sequence):
            self._deferred_blocks.setdefault(sequence.last_step, []).extend(blocks)
            self.num_deferred += len(blocks)
        else:
            self._pool.release(blocks)

    def num_coming_back(self, ending: Iterable[Sequence]) -> int:
        """Blocks that become free with the results in flight, which also end these sequences."""
        released = [block for blocks in self._deferred_blocks.values() for block in blocks]
        for sequence in ending:
            released += sequence.blocks
        return self._pool.num_coming_back(released)

    def announce(self, step: int) -> list[int]:
        """Rows that the plan of `step` names as freed."""
        rows, self._unannounced_rows = self._unannounced_rows, []
        if rows:
            self._announced_rows[step] = rows
        return rows

    def settle(self, step: int) -> None:
        """The result of `step` is here: what waited for it is free."""
        self.last_result_step = step
        self._free_rows += self._announced_rows.pop(step, ())
        blocks = self._deferred_blocks.pop(step, None)
        if blocks:
            self.num_deferred -= len(blocks)
            self._pool.release(blocks)

    def check(self, running: Iterable[Sequence]) -> None:
        """Assert that every row has one owner, and every block as many as it counts; for tests."""
        running = list(running)
        deferred = [block for blocks in self._deferred_blocks.values() for block in blocks]
        assert len(deferred) == self.num_deferred, "deferred blocks miscounted"
        assert all(step > self.last_result_step for step in self._deferred_blocks)
        self._pool.check([block for s in running for block in s.blocks] + deferred)
        announced = [row for rows in self._announced_rows.values() for row in rows]
        rows = self._free_rows + self._unannounced_rows + announced + [s.row for s in running]
        assert sorted(rows) == list(range(self._limits.num_rows)), "a row is lost or shared"
