"""Runs plans with a model: rows to tensors, forward, sampling, rows again.

Every method runs on the runner's thread, which owns the device.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from services.worker.batch import Batch, BatchBuilder
from services.worker.contract import ActiveRows, begin_step
from services.worker.drafting.proposer import Drafter, Proposer
from services.worker.drafting.speculator import Speculator
from services.worker.grammar.compiler import GrammarCompiler
from services.worker.grammar.rows import RowConstraints
from services.worker.graphs.frames import Frames
from services.worker.graphs.sizes import CaptureSizes
from services.worker.lockstep import OwnPace, Pace
from services.worker.model.metadata import StepMetadata
from services.worker.plan import (
    Capacity,
    ContractError,
    NewSequence,
    StepPlan,
    StepResult,
    StepTimings,
)
from services.worker.prompt_logprobs import PromptLogprobs
from services.worker.rows import RowTable
from services.worker.sampling_rows import SamplingRows
from services.worker.step_end import Computed, SampleEnd, StepEnd
from services.worker.tokens import OwnTokens, TokenSource
from shared.errors import FailureReason, RequestError

CachesT = TypeVar("CachesT")
CachesT_contra = TypeVar("CachesT_contra", contravariant=True)


class DecoderLike(Protocol[CachesT_contra]):
    """What the executor needs of a model."""

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: CachesT_contra) -> Tensor:
        """[T] token ids to [T, E] hidden states; writes the caches at the step's slots."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states to [S, V] float32 logits."""
        ...


class PartialDecoder(Protocol[CachesT_contra]):
    """A decoder whose last layer can be asked for the tokens that are sampled alone."""

    def begin(
        self, token_ids: Tensor, step: StepMetadata, caches: CachesT_contra
    ) -> tuple[Tensor, ...]:
        """[T] token ids to what `end` needs of each, [T, ..]; writes the caches of all layers."""
        ...

    def end(self, state: tuple[Tensor, ...], step: StepMetadata, caches: CachesT_contra) -> Tensor:
        """Rows of that, and a step of those tokens, to [S, E] hidden states."""
        ...


class ModelExecutor(Generic[CachesT]):
    """Runs plans with a decoder."""

    def __init__(
        self,
        decoder: DecoderLike[CachesT],
        caches: CachesT,
        capacity: Capacity,
        *,
        num_known_ids: int,
        device: torch.device,
        row_multiple: int,
        drafter: Drafter[CachesT] | None = None,
        partial: PartialDecoder[CachesT] | None = None,
        has_head: bool = True,
        tokens: TokenSource | None = None,
        pace: Pace | None = None,
        sizes: CaptureSizes | None = None,
        grammars: GrammarCompiler | None = None,
        take_memory: Callable[[], object] = lambda: None,
    ) -> None:
        """Build the parts.

        Args:
            decoder: The model.
            caches: Its caches.
            capacity: Limits.
            num_known_ids: Bounds what can be sampled.
            device: Where the model is.
            row_multiple: Steps are padded to a multiple of it.
            drafter: Needed where the capacity has speculative tokens and the head is.
            partial: The decoder again, if it can leave out what nobody samples; not with drafts,
                which need the states of all tokens.
            has_head: Whether logits are computed here, and not on a later pipeline stage.
            tokens: Where tokens come from; by default this rank samples.
            pace: What other replicas do meanwhile; by default there are none.
            sizes: Of the decode steps that the decoder captures, if it does.
            grammars: Compiles constraints; without it a sequence that has one fails.
            take_memory: Has the system give the memory of the caches, in the background.
        """
        self._has_head = has_head
        self._pace: Pace = pace or OwnPace()
        self.capacity = capacity
        self._decoder = decoder
        self._partial = partial
        self._caches = caches
        self._table = RowTable(capacity)
        self._sampling = _sampling_rows(capacity, num_known_ids, tokens, grammars)
        self._builder = BatchBuilder(self._table, device, row_multiple=row_multiple, sizes=sizes)
        self._prompts = PromptLogprobs(self._table, tokens or OwnTokens(), num_known_ids)
        self._end: StepEnd = SampleEnd(self._table, self._sampling, tokens)
        if capacity.num_speculative_tokens:
            assert (drafter is not None) == has_head
            proposer = self._proposer(drafter, device, tokens, num_known_ids, row_multiple)
            self._end = Speculator(proposer, self._table, self._sampling, tokens)
        self._max_plans_in_flight = 1
        self._take_memory = take_memory

    def _proposer(
        self,
        drafter: Drafter[CachesT] | None,
        device: torch.device,
        tokens: TokenSource | None,
        num_known_ids: int,
        row_multiple: int,
    ) -> Proposer[CachesT]:
        return Proposer(
            drafter,
            self._caches,
            self._table,
            num_known_ids=num_known_ids,
            device=device,
            row_multiple=row_multiple,
            tokens=tokens,
            pace=self._pace,
        )

    def start_epoch(self, max_plans_in_flight: int) -> None:
        """Free every row."""
        self._max_plans_in_flight = max_plans_in_flight
        self._table.reset()
        self._sampling.reset()
        self._end.reset()

    @torch.inference_mode()
    def capture_steps(self) -> None:
        """Run a decode step of each captured size that belongs to nobody, the largest first."""
        frames = self._builder.frames
        if frames is None:
            return
        for num_seqs in reversed(frames.sizes.num_seqs):
            # A device may choose how it computes by the lengths it sees when a step is captured.
            self._run_nothing(frames, num_seqs, seq_len=frames.sizes.rows_per_seq)

    def _run_nothing(self, frames: Frames, num_seqs: int, *, seq_len: int = 0) -> None:
        """A captured step that belongs to nobody."""
        frames.write_nothing(num_seqs, seq_len=seq_len)
        frame = frames.send(num_seqs)
        step = self._pace.in_step(frame.metadata)
        self._decoder.forward(frame.token_ids, step, self._caches)

    @torch.inference_mode()
    def _idle(self) -> None:
        """The forward that other replicas wait for, if they do."""
        num_seqs, frames = self._pace.captured_num_seqs(), self._builder.frames
        if num_seqs and frames is not None:
            self._run_nothing(frames, num_seqs)
        else:
            self._pace.idle()

    def finish_step(self) -> None:
        """Propose the drafts of the next step."""
        self._end.finish()
        self._pace.finish()

    def take_memory(self) -> None:
        """Have the system give the memory of all blocks, in the background."""
        self._take_memory()

    def num_rows_in_use(self) -> int:
        """Rows that a scheduler holds."""
        return self._table.num_in_use()

    def rows_digest(self) -> int:
        """64 bits over all rows: the same on all ranks of a replica."""
        return self._table.digest()

    def execute(self, plan: StepPlan, wait_us: int) -> StepResult:
        """Run one plan.

        Raises:
            ContractError: The plan does not fit the rows.
        """
        self.finish_step()
        started = time.perf_counter_ns()
        active = self._begin(plan)
        computed = None
        prepared_at = computed_at = started
        if len(active.rows):
            batch = self._builder.build(active, self._pace.captured_num_seqs())
            prepared_at = time.perf_counter_ns()
            computed = self._compute(batch)
            computed_at = time.perf_counter_ns()
        else:
            self._idle()
        result = self._end.end(plan, active, computed)
        for row in plan.freed_rows:
            self._sampling.free(row)
            self._prompts.free(row)
        num_masks, mask_us = self._sampling.constraints.take_cost()
        timings = StepTimings(
            wait_us=wait_us,
            prepare_us=(prepared_at - started) // 1000,
            forward_us=(computed_at - prepared_at) // 1000,
            sample_us=(time.perf_counter_ns() - computed_at) // 1000,
            draft_us=result.timings.draft_us,
            mask_us=mask_us,
            num_masks=num_masks,
        )
        prompts = () if computed is None else computed.prompt_logprobs
        return replace(result, timings=timings, prompt_logprobs=prompts)

    def _begin(self, plan: StepPlan) -> ActiveRows:
        """Take the plan; where it is refused, other replicas get the step they wait for."""
        try:
            self._pace.begin(plan)
            return begin_step(plan, self._table, self._max_plans_in_flight, self._admit)
        except ContractError:
            self._idle()
            self._pace.finish()
            raise

    def _admit(self, new: NewSequence) -> None:
        if not self._table.admit(new):
            return
        if new.replay is not None:
            self._table.fail(new.row, _no_replay())
            return
        try:
            self._sampling.admit(new)
            self._prompts.admit(new)
        except RequestError as error:
            self._table.fail(new.row, error)

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> Computed:
        step = self._pace.in_step(batch.metadata)
        is_cut = batch.num_sampled < step.num_tokens and not self._prompts.reads(batch)
        if self._partial is not None and is_cut:
            return self._compute_sampled(self._partial, batch, step)
        hidden = self._decoder.forward(batch.token_ids, step, self._caches)
        head = self._decoder.compute_logits if self._has_head else None
        # First, as the head may write all of its logits to the same memory.
        prompts = self._prompts.measure(batch, hidden, head)
        if not self._has_head or not len(batch.sampling_entries):
            return Computed(batch=batch, hidden=hidden, logits=None, prompt_logprobs=prompts)
        sampled = hidden
        if batch.sampling_positions is not None:
            sampled = hidden[batch.sampling_positions]
        logits = self._decoder.compute_logits(sampled)[: batch.num_sampled]
        return Computed(batch=batch, hidden=hidden, logits=logits, prompt_logprobs=prompts)

    def _compute_sampled(
        self, decoder: PartialDecoder[CachesT], batch: Batch, step: StepMetadata
    ) -> Computed:
        """The same with the states of those tokens alone that are sampled."""
        state = decoder.begin(batch.token_ids, step, self._caches)
        tokens = batch.sampling_positions
        if tokens is None or not batch.num_sampled:
            return Computed(batch=batch, hidden=state[0][:0], logits=None)
        rows = tuple(part.index_select(0, tokens) for part in state)
        hidden = decoder.end(rows, step.of_tokens(tokens), self._caches)
        logits = self._decoder.compute_logits(hidden)[: batch.num_sampled]
        return Computed(batch=batch, hidden=hidden, logits=logits)


def _sampling_rows(
    capacity: Capacity,
    num_known_ids: int,
    tokens: TokenSource | None,
    grammars: GrammarCompiler | None,
) -> SamplingRows:
    """How rows are sampled; masks are made where they are."""
    is_sampling = tokens is None or tokens.is_sampling
    constraints = RowConstraints(
        capacity.num_rows, grammars if is_sampling else None, is_refusing=grammars is None
    )
    return SamplingRows(capacity.num_rows, num_known_ids, constraints)


def _no_replay() -> RequestError:
    return RequestError(
        FailureReason.FEATURE_DISABLED,
        "replay: this worker runs a model and takes no script",
        field="replay",
    )
