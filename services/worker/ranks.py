"""What being one rank of several changes about building an executor; alone, nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from services.worker.graphs.sizes import CaptureSizes
from services.worker.kv_cache import KVCaches
from services.worker.lockstep import Lockstep, Pace
from services.worker.model.decoder import Decoder
from services.worker.model.metadata import ExpertTraffic, StepMetadata
from services.worker.model.spec import ModelSpec
from services.worker.model_executor import ModelExecutor
from services.worker.parallel.group_executor import GroupExecutor
from services.worker.parallel.moe_method import MoeMethod
from services.worker.parallel.seat import Seat
from services.worker.parallel.shared_tokens import SharedTokens
from services.worker.plan import Capacity
from services.worker.runner import StepExecutor
from services.worker.tokens import TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """Parts of an executor that depend on the other ranks; None: those of a rank alone."""

    has_head: bool = True
    tokens: TokenSource | None = None
    pace: Pace | None = None


class Ranks(Protocol):
    """This rank among all of its world."""

    @property
    def can_capture(self) -> bool:
        """Whether steps can be captured."""
        ...

    def place(self, spec: ModelSpec) -> ModelSpec:
        """The part of the model that is here."""
        ...

    def wait_for_others(self, is_stopping: Callable[[], bool]) -> None:
        """Reading weights takes each rank its own time; what follows, they do together."""
        ...

    def agree(self, limits: Capacity, spec: ModelSpec) -> Capacity:
        """The limits of all ranks; ConfigError if they were started for different things."""
        ...

    def traffic(self, spec: ModelSpec, step: StepMetadata) -> list[StepMetadata]:
        """A step in each of the ways that tokens may take in it."""
        ...

    def method_of(self, spec: ModelSpec) -> Callable[[int], MoeMethod | None]:
        """How tokens of a step of so many reach experts on other ranks; None: all are here."""
        ...

    def parts(
        self,
        decoder: Decoder,
        caches: KVCaches,
        row_multiple: int,
        sizes: CaptureSizes | None = None,
    ) -> ExecutorParts:
        """What the executor is built with; `sizes` are those of captured steps."""
        ...

    def finish(self, executor: ModelExecutor[KVCaches]) -> StepExecutor:
        """The executor as the runner knows it."""
        ...


class Alone:
    """There are no others."""

    can_capture = True

    def place(self, spec: ModelSpec) -> ModelSpec:
        """All of it."""
        return spec

    def wait_for_others(self, is_stopping: Callable[[], bool]) -> None:
        """Nobody."""

    def agree(self, limits: Capacity, spec: ModelSpec) -> Capacity:
        """As they are."""
        return limits

    def traffic(self, spec: ModelSpec, step: StepMetadata) -> list[StepMetadata]:
        """One way."""
        return [step]

    def method_of(self, spec: ModelSpec) -> Callable[[int], MoeMethod | None]:
        """All are here."""
        return lambda num_tokens: None

    def parts(
        self,
        decoder: Decoder,
        caches: KVCaches,
        row_multiple: int,
        sizes: CaptureSizes | None = None,
    ) -> ExecutorParts:
        """Nothing else."""
        return ExecutorParts()

    def finish(self, executor: ModelExecutor[KVCaches]) -> StepExecutor:
        """As it is."""
        return executor


class Together:
    """One seat of a world."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    @property
    def can_capture(self) -> bool:
        """Not on pipeline stages: what they hand on is of another size in each step."""
        return self._seat.settings.pipeline_parallel_size == 1

    def place(self, spec: ModelSpec) -> ModelSpec:
        """This rank's layers, heads, columns and experts."""
        return self._seat.place(spec)

    def wait_for_others(self, is_stopping: Callable[[], bool]) -> None:
        """Wait, however long it takes; WorldLostError if one is lost."""
        self._seat.wait_for_others("loaded", is_stopping)

    def agree(self, limits: Capacity, spec: ModelSpec) -> Capacity:
        """As many blocks as the rank with the fewest has; everything else must be the same."""
        seat = self._seat
        facts = {
            "model": limits.model_digest,
            "max_model_len": limits.max_model_len,
            "vocab_size": limits.vocab_size,
        }
        seat.agree(spec, facts)
        is_joint = seat.settings.topology.is_joint
        ladder = seat.rules(spec).ladder(limits.max_num_batched_tokens)
        return replace(
            limits,
            num_blocks=seat.least("blocks", limits.num_blocks),
            data_parallel_size=seat.settings.data_parallel_size if is_joint else 1,
            data_parallel_rank=seat.settings.data_parallel_rank if is_joint else 0,
            moe_ladder=ladder if is_joint else (),
        )

    def traffic(self, spec: ModelSpec, step: StepMetadata) -> list[StepMetadata]:
        """By each method that steps of this world take."""
        if spec.placement.ep_size == 1:
            return [step]
        ladder = self._seat.rules(spec).ladder(self._seat.settings.max_num_batched_tokens)
        return [
            replace(step, traffic=ExpertTraffic(method=method, num_tokens=step.num_tokens))
            for method in dict.fromkeys(method for _, method in ladder)
        ]

    def method_of(self, spec: ModelSpec) -> Callable[[int], MoeMethod | None]:
        """As the rules of the world say."""
        if spec.placement.ep_size == 1:
            return lambda num_tokens: None
        return self._seat.rules(spec).choose

    def parts(
        self,
        decoder: Decoder,
        caches: KVCaches,
        row_multiple: int,
        sizes: CaptureSizes | None = None,
    ) -> ExecutorParts:
        """Shared tokens, and a pace where experts are spread."""
        seat, spec = self._seat, decoder.spec
        topology = seat.settings.topology
        has_head = spec.placement.is_last_stage(spec.config)
        tokens: TokenSource | None = None
        if topology.replica_size > 1:
            tokens = SharedTokens(seat.world.groups.replica, topology)
        pace = None
        if spec.placement.ep_size > 1:
            pace = _pace(seat, decoder, caches, row_multiple, sizes)
        return ExecutorParts(has_head=has_head, tokens=tokens, pace=pace)

    def finish(self, executor: ModelExecutor[KVCaches]) -> StepExecutor:
        """Under the eyes of the others."""
        seat = self._seat
        return GroupExecutor(executor, seat.world, seat.watch, checks_rows=seat.settings.check_rows)


def _pace(
    seat: Seat,
    decoder: Decoder,
    caches: KVCaches,
    row_multiple: int,
    sizes: CaptureSizes | None,
) -> Lockstep:
    spec = decoder.spec

    def idle(step: StepMetadata) -> None:
        ids = torch.zeros(step.num_tokens, dtype=torch.int64, device=spec.device)
        decoder.forward(ids, step, caches)

    def idle_draft(step: StepMetadata) -> None:
        ids = torch.zeros(step.num_tokens, dtype=torch.int64, device=spec.device)
        shape = (step.num_tokens, spec.config.hidden_size)
        hidden = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        decoder.draft(ids, hidden, step, caches)

    return Lockstep(
        seat.rules(spec),
        num_replicas=seat.settings.data_parallel_size,
        row_multiple=row_multiple,
        has_drafts=seat.settings.num_speculative_tokens > 0,
        run_idle=idle,
        run_idle_draft=idle_draft if decoder.mtp is not None else None,
        device=spec.device,
        sizes=sizes,
    )
