"""A model on a CPU whose steps are done from records: a decoder and a drafter like the one it has.

Any step can be: its tokens lie behind each other whatever sequences they belong to, and kernels
read all lengths from tensors. So there are no sizes to choose and no rows to pad.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.buffers import StepBuffers
from services.worker.graphs.recorded_function import RecordedFunction
from services.worker.model.metadata import StepMetadata
from services.worker.ops.native import Native
from services.worker.plan import Capacity

CachesT = TypeVar("CachesT")
CachesT_contra = TypeVar("CachesT_contra", contravariant=True)


class Model(Protocol[CachesT_contra]):
    """What is recorded: a decoder that can draft as well, perhaps."""

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: CachesT_contra) -> Tensor:
        """[T] token ids to [T, E] hidden states."""
        ...

    def begin(
        self, token_ids: Tensor, step: StepMetadata, caches: CachesT_contra
    ) -> tuple[Tensor, ...]:
        """[T] token ids to what `end` needs of each, [T, ..]; with no drafts only."""
        ...

    def end(self, state: tuple[Tensor, ...], step: StepMetadata, caches: CachesT_contra) -> Tensor:
        """Rows of that, and a step of those tokens, to [S, E] hidden states."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states to [S, V] float32 logits."""
        ...

    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: CachesT_contra
    ) -> Tensor:
        """[T] token ids and [T, E] states to [T, E] states."""
        ...

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] states to [S, V] float32 logits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesForm:
    """What the model's hidden states look like."""

    width: int
    dtype: torch.dtype
    has_drafts: bool


class RecordedModel(Generic[CachesT]):
    """Does the steps of a model from records. One thread uses it.

    Law: what `forward`, `begin` or `draft` returns is there until one of them is called again, and
    likewise results of `end`, and logits, until the next ones.
    """

    def __init__(
        self,
        model: Model[CachesT],
        caches: CachesT,
        limits: Capacity,
        form: StatesForm,
        native: Native,
        *,
        row_multiple: int,
    ) -> None:
        """Record everything.

        Args:
            model: The model; it has run once, so that its operators know their weights.
            caches: Its caches, the only ones it will be used with.
            limits: Bounds of a step.
            form: Of its states.
            native: The kernels that its operators call.
            row_multiple: Steps are padded to a multiple of it.

        Raises:
            CaptureError: The model does what cannot be done from a record.
        """
        self.model = model
        self._caches = caches
        max_tokens = limits.max_num_batched_tokens + row_multiple
        max_seqs = limits.max_num_seqs + 1
        self._max_logits = max_logits = (
            limits.max_num_seqs * (1 + limits.num_speculative_tokens) + row_multiple
        )
        self._buffers = StepBuffers(limits, max_tokens, max_seqs)
        self._states = torch.zeros((max_tokens, form.width), dtype=form.dtype)
        self._sampled = torch.zeros((max_logits, form.width), dtype=form.dtype)
        layers, heads = Arena(), Arena()
        self._forward = RecordedFunction(native, layers, self._forward_rows, max_tokens)
        self._head = RecordedFunction(native, heads, self._head_rows, max_logits)
        if form.has_drafts:
            self._draft = RecordedFunction(native, layers, self._draft_rows, max_tokens)
            self._draft_head = RecordedFunction(native, heads, self._draft_head_rows, max_logits)
            return  # drafts need the states of all tokens
        self._begin = RecordedFunction(native, layers, self._begin_rows, max_tokens)
        self._some = StepBuffers(limits, max_logits, max_logits)
        self._state = tuple(
            torch.zeros((max_logits, *part.shape[1:]), dtype=part.dtype)
            for part in self._begin.run(1)
        )
        self._end = RecordedFunction(native, Arena(), self._end_rows, max_logits)

    def forward(self, token_ids: Tensor, step: StepMetadata, caches: CachesT) -> Tensor:
        """[T] token ids to [T, E] hidden states."""
        assert caches is self._caches
        if step.traffic is not None:  # what this step alone knows of other ranks
            return self.model.forward(token_ids, step, caches)
        self._buffers.fill(token_ids, step)
        return self._forward.run(step.num_tokens)[0]

    def begin(self, token_ids: Tensor, step: StepMetadata, caches: CachesT) -> tuple[Tensor, ...]:
        """[T] token ids to what `end` needs of each, [T, ..]."""
        assert caches is self._caches
        assert step.traffic is None
        self._buffers.fill(token_ids, step)
        return self._begin.run(step.num_tokens)

    def end(self, state: tuple[Tensor, ...], step: StepMetadata, caches: CachesT) -> Tensor:
        """Rows of that, and a step of those tokens, to [S, E] hidden states."""
        assert caches is self._caches
        for target, part in zip(self._state, state, strict=True):
            target[: step.num_tokens] = part
        self._some.fill(step.positions, step)  # no layer reads the ids
        return self._end.run(step.num_tokens)[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states to [S, V] float32 logits."""
        count = hidden.shape[0]
        if count > self._max_logits:  # more than are ever sampled
            return self.model.compute_logits(hidden)
        self._sampled[:count] = hidden
        return self._head.run(count)[0]

    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: CachesT
    ) -> Tensor:
        """[T] token ids and [T, E] states to [T, E] states."""
        assert caches is self._caches
        if step.traffic is not None:
            return self.model.draft(token_ids, hidden, step, caches)
        # First: the states may be those of the last run, which this one writes over.
        self._states[: hidden.shape[0]] = hidden
        self._buffers.fill(token_ids, step)
        return self._draft.run(step.num_tokens)[0]

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] states to [S, V] float32 logits."""
        count = hidden.shape[0]
        self._sampled[:count] = hidden
        return self._draft_head.run(count)[0]

    def measure(self, num_tokens: int, times: int = 30) -> list[tuple[str, float]]:
        """Operators of the last step's forward and of its head, with the least time of each call.

        Args:
            num_tokens: Of the last step, all of which were sampled.
            times: How often the step is done again.
        """
        least: list[tuple[str, float]] = []
        for function in (self._forward, self._head):
            runs = [function.measure(num_tokens) for _ in range(times)]
            for calls in zip(*runs, strict=True):
                least.append((calls[0][0].operator, min(seconds for _, seconds in calls)))
        return least

    def _forward_rows(self, num_tokens: int) -> tuple[Tensor, ...]:
        token_ids, step = self._buffers.step(num_tokens)
        return (self.model.forward(token_ids, step, self._caches),)

    def _begin_rows(self, num_tokens: int) -> tuple[Tensor, ...]:
        token_ids, step = self._buffers.step(num_tokens)
        return self.model.begin(token_ids, step, self._caches)

    def _end_rows(self, num_rows: int) -> tuple[Tensor, ...]:
        step = self._some.step(num_rows)[1]
        state = tuple(part[:num_rows] for part in self._state)
        return (self.model.end(state, step, self._caches),)

    def _head_rows(self, num_rows: int) -> tuple[Tensor, ...]:
        return (self.model.compute_logits(self._sampled[:num_rows]),)

    def _draft_rows(self, num_tokens: int) -> tuple[Tensor, ...]:
        token_ids, step = self._buffers.step(num_tokens)
        states = self._states[:num_tokens]
        return (self.model.draft(token_ids, states, step, self._caches),)

    def _draft_head_rows(self, num_rows: int) -> tuple[Tensor, ...]:
        return (self.model.compute_draft_logits(self._sampled[:num_rows]),)
