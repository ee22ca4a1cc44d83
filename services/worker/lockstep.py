"""Keeps the forwards of an expert-parallel world in step.

Every layer with experts is an exchange of all ranks that hold some. So in each tick all replicas
make the same forwards, the model's and those of the MTP layer, whatever they have to compute: a
replica without tokens sends one that belongs to nobody. What a forward must know about the others
is in the plan's tick; a replica that is alone finds it in its own tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from services.worker.graphs.sizes import CaptureSizes
from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.parallel.moe_method import MoeRules
from services.worker.plan import ContractError, Ints, StepPlan, Tick


class Pace(Protocol):
    """What an executor asks before each forward."""

    def begin(self, plan: StepPlan) -> None:
        """A step starts; ContractError if its plan does not say what it must."""
        ...

    def in_step(self, metadata: StepMetadata) -> StepMetadata:
        """The model's forward, with what it must know of the others."""
        ...

    def in_draft(self, metadata: StepMetadata) -> StepMetadata:
        """The next forward of the MTP layer, with what it must know of the others."""
        ...

    def most_drafts(self) -> tuple[int, int] | None:
        """Most drafts of a row, and most rows that get some; None for no such limits."""
        ...

    def captured_num_seqs(self) -> int | None:
        """Sequences of the captured step to take, 0 for none; None: as this replica likes."""
        ...

    def idle(self) -> None:
        """The model's forward of a step in which nothing is computed here, if others wait."""
        ...

    def finish(self) -> None:
        """The forwards of the MTP layer that others make in this step and this replica did not."""
        ...


class OwnPace:
    """A replica whose experts are all here, or cut like everything else."""

    def begin(self, plan: StepPlan) -> None:
        """Nobody waits."""

    def in_step(self, metadata: StepMetadata) -> StepMetadata:
        """As it is."""
        return metadata

    def in_draft(self, metadata: StepMetadata) -> StepMetadata:
        """As it is."""
        return metadata

    def most_drafts(self) -> tuple[int, int] | None:
        """No limits."""
        return None

    def captured_num_seqs(self) -> int | None:
        """As it likes."""
        return None

    def idle(self) -> None:
        """Nobody waits."""

    def finish(self) -> None:
        """Nobody waits."""


class Lockstep:
    """A replica whose experts are spread over ranks, its own or those of others too."""

    def __init__(
        self,
        rules: MoeRules,
        *,
        num_replicas: int,
        row_multiple: int,
        has_drafts: bool,
        run_idle: Callable[[StepMetadata], None],
        run_idle_draft: Callable[[StepMetadata], None] | None,
        device: torch.device,
        sizes: CaptureSizes | None = None,
    ) -> None:
        """Say what is done while others compute.

        Args:
            rules: Choose a method where no tick does.
            num_replicas: Replicas of the world.
            row_multiple: Steps are padded to a multiple of it.
            has_drafts: Whether every step is followed by passes of the MTP layer.
            run_idle: The model's forward over a step of one token that belongs to nobody.
            run_idle_draft: The same of the MTP layer; None on stages without it.
            device: Where the model is.
            sizes: Of the steps that are captured.
        """
        self._sizes = sizes
        self._rules = rules
        self._is_joint = num_replicas > 1
        self._multiple = row_multiple
        self._has_drafts = has_drafts
        self._run_idle = run_idle
        self._run_idle_draft = run_idle_draft
        self._nobody = _nobody(row_multiple, device)
        self._tick: Tick | None = None
        self._num_drafted = 0

    def begin(self, plan: StepPlan) -> None:
        """A step starts; ContractError if its plan does not say what it must."""
        self._tick = tick = plan.tick if self._is_joint else None
        self._num_drafted = 0
        if not self._is_joint:
            return
        if tick is None:
            raise ContractError("a plan for one of several replicas needs a tick")
        if self._has_drafts and tick.num_draft_passes < 1:
            raise ContractError("num_draft_passes of the tick must be at least 1")
        num_tokens = max(1, int(plan.num_scheduled_tokens.sum()))
        if num_tokens > tick.num_tokens:
            raise ContractError(
                f"{num_tokens} tokens are more than num_tokens {tick.num_tokens} of the tick"
            )
        if tick.captured_num_seqs:
            self._check_captured(plan, tick)

    def _check_captured(self, plan: StepPlan, tick: Tick) -> None:
        """Raise where the tick asks for a captured step that there is not, or the plan has more."""
        sizes, num_seqs = self._sizes, tick.captured_num_seqs
        if sizes is None or num_seqs not in sizes.num_seqs:
            # All replicas refuse it, and meet in a step that is not captured.
            self._tick = replace(tick, captured_num_seqs=0)
            raise ContractError(f"captured_num_seqs {num_seqs} of the tick is no captured size")
        if tick.num_tokens != num_seqs * sizes.rows_per_seq:
            self._tick = replace(tick, captured_num_seqs=0)
            raise ContractError(
                f"num_tokens {tick.num_tokens} of the tick is not that of {num_seqs} sequences of "
                f"{sizes.rows_per_seq}"
            )
        most = int(plan.num_scheduled_tokens.max(initial=0))
        if len(plan.rows) > num_seqs or most > sizes.rows_per_seq:
            raise ContractError(
                f"{len(plan.rows)} sequences of up to {most} tokens are more than the captured "
                f"step's {num_seqs} of {sizes.rows_per_seq}"
            )

    def captured_num_seqs(self) -> int | None:
        """Sequences of the captured step to take, 0 for none; None: as this replica likes."""
        return None if self._tick is None else self._tick.captured_num_seqs

    def in_step(self, metadata: StepMetadata) -> StepMetadata:
        """The model's forward, with what it must know of the others."""
        return self._with_traffic(metadata, None if self._tick is None else self._tick.num_tokens)

    def in_draft(self, metadata: StepMetadata) -> StepMetadata:
        """The next forward of the MTP layer, with what it must know of the others."""
        self._num_drafted += 1
        tick = self._tick
        if tick is None:
            return self._with_traffic(metadata, None)
        is_first = self._num_drafted == 1
        return self._with_traffic(metadata, tick.num_tokens if is_first else tick.num_draft_rows)

    def most_drafts(self) -> tuple[int, int] | None:
        """Most drafts of a row, and most rows that get some; None for no such limits."""
        tick = self._tick
        return None if tick is None else (tick.num_draft_passes, tick.num_draft_rows)

    def idle(self) -> None:
        """The model's forward of a step in which nothing is computed here, if others wait."""
        if self._tick is not None:
            self._run_idle(self.in_step(self._nobody))

    def finish(self) -> None:
        """The forwards of the MTP layer that others make in this step and this replica did not."""
        if self._tick is None or self._run_idle_draft is None:
            return
        while self._num_drafted < self._tick.num_draft_passes:
            self._run_idle_draft(self.in_draft(self._nobody))

    def _with_traffic(self, metadata: StepMetadata, most: int | None) -> StepMetadata:
        """`most`: tokens of the largest replica; None where there is one."""
        own, tick = metadata.num_tokens, self._tick
        if tick is None or most is None:
            method, num_tokens = self._rules.choose(own), own
        else:
            method, num_tokens = tick.method, -(-most // self._multiple) * self._multiple
        return replace(metadata, traffic=ExpertTraffic(method=method, num_tokens=num_tokens))


def limit_drafts(entries: Ints, counts: Ints, pace: Pace) -> tuple[Ints, Ints]:
    """The rows that get drafts, and how many of each, within what the tick has room for."""
    most = pace.most_drafts()
    if most is None:
        return entries, counts
    passes, rows = most
    return entries[:rows], counts[:rows].clip(max=passes)


def _nobody(count: int, device: torch.device) -> StepMetadata:
    """Tokens of no sequence: they read nothing and write into the scratch block."""
    return StepMetadata(
        num_tokens=count,
        positions=torch.zeros(count, dtype=torch.int64, device=device),
        slot_mapping=torch.arange(count, dtype=torch.int32, device=device),
        cum_query_lens=torch.tensor([count], dtype=torch.int32, device=device),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=device),
        block_table=torch.zeros((1, 1), dtype=torch.int32, device=device),
    )
