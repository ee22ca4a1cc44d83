"""An executor as one rank of a world: its steps are watched, and no step survives a failure.

A rank that fails in the middle of a step leaves the others in an exchange that nobody joins, so
there is no next step for any of them. Only a plan that is refused is refused by all ranks alike,
before anything is exchanged.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch

from services.worker.parallel.watch import Watch
from services.worker.parallel.world import World
from services.worker.plan import Capacity, ContractError, StepPlan, StepResult
from services.worker.runner import StepExecutor, WorldLostError
from shared.log import get_logger

_log = get_logger(__name__)

_BEFORE_FIRST: Final = 0


class MirroredExecutor(StepExecutor, Protocol):
    """An executor whose rows are the same on all ranks of a replica."""

    def rows_digest(self) -> int:
        """64 bits over all rows."""
        ...


class GroupExecutor:
    """Wraps a rank's executor; a `StepExecutor` itself."""

    def __init__(
        self, inner: MirroredExecutor, world: World, watch: Watch, *, checks_rows: bool
    ) -> None:
        """`checks_rows`: compare the rows of all ranks behind every step."""
        self._inner = inner
        self._world = world
        self._watch = watch
        self._checks_rows = checks_rows
        self._step = _BEFORE_FIRST

    @property
    def capacity(self) -> Capacity:
        """What the replica can hold."""
        return self._inner.capacity

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """Free every row."""
        self._inner.start_epoch(max_plans_in_flight)

    def take_memory(self) -> None:
        """Of this rank."""
        self._inner.take_memory()

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds."""
        return self._inner.num_rows_in_use()

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan.

        Raises:
            ContractError: The plan does not fit the rows, on any rank.
            WorldLostError: Something else went wrong, here or elsewhere.
        """
        self._step = plan.step
        with self._watched():
            result = self._inner.execute(plan, wait_us)
            if self._checks_rows:
                self._compare_rows()
            return result

    def finish_step(self) -> None:
        """Do what the next step needs.

        Raises:
            WorldLostError: Something went wrong, here or elsewhere.
        """
        with self._watched():
            self._inner.finish_step()
            if self._checks_rows:
                self._compare_rows()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        progress = self._world.progress
        progress.begin(self._step)
        try:
            yield
        except ContractError:
            progress.end()
            raise
        except Exception as error:
            position = progress.position()
            text = f"failed {position}: {type(error).__name__}: {_first_line(error)}"
            _log.exception("a rank failed", extra={"rank": self._world.membership.number})
            # A broken exchange says that another rank is gone, not that this one is at fault.
            self._watch.fail(text, is_echo=bool(position.meeting))
            raise WorldLostError(f"rank {self._world.membership.number} {text}") from error
        progress.end()

    def _compare_rows(self) -> None:
        group = self._world.groups.replica
        digests = group.all_gather(torch.tensor([self._inner.rows_digest()])).tolist()
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        assert not others, f"rows of ranks {others} of the replica differ from the leader's"


def _first_line(error: Exception) -> str:
    """Without the place in Gloo's source, and its advice."""
    line = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error).partition("\n")[0])
    return line.partition(". This is typically")[0][:500]
