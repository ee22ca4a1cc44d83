"""A model whose decode steps are captured at chosen sizes, with the face of that model.

Everything else calls each operator: steps with prompts in them, steps beyond the largest size, the
head, and drafts (the published deployments do not capture them either).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from services.worker.graphs.capture import Captured, Capturer
from services.worker.graphs.recorded_model import Model
from services.worker.graphs.recording import CaptureError
from services.worker.model.metadata import ExpertTraffic, StepMetadata
from shared.log import get_logger

_log = get_logger(__name__)

CachesT = TypeVar("CachesT")

_Key = tuple[int, ExpertTraffic | None]


class CapturedModel(Generic[CachesT]):
    """Does decode steps from captured ones. One thread uses it.

    Law: what `forward` returns is there until it is called again.
    """

    def __init__(self, model: Model[CachesT], caches: CachesT, capturer: Capturer) -> None:
        """Capture steps of a model on its only caches, each size when it is first seen.

        Steps of a size may differ in how tokens reach experts on other ranks: each is captured.
        """
        self._model = model
        self._caches = caches
        self._capturer = capturer
        self._captured: dict[_Key, _Known] = {}
        self._can_capture = True

    @property
    def sizes(self) -> list[int]:
        """Tokens of the steps that are captured by now."""
        return sorted(num_tokens for num_tokens, _ in self._captured)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: StepMetadata, caches: CachesT) -> Tensor:
        """[T] token ids to [T, E] hidden states."""
        if not step.is_captured:
            return self._model.forward(token_ids, step, caches)
        assert caches is self._caches
        known = self._captured.get(_key(step)) or self._capture(token_ids, step)
        if known is None:
            return self._model.forward(token_ids, step, caches)
        assert known.addresses == _addresses(token_ids, step), "a captured step's tensors moved"
        known.captured.run()
        return known.captured.result[0]

    def _capture(self, token_ids: Tensor, step: StepMetadata) -> "_Known | None":
        """Capture a size; None if that is not possible."""
        if not self._can_capture:
            return None
        try:
            captured = self._capturer.capture(
                lambda: (self._model.forward(token_ids, step, self._caches),)
            )
        except CaptureError as error:
            self._can_capture = False
            _log.warning("steps are not captured, each operator is called from Python: %s", error)
            return None
        known = _Known(captured=captured, addresses=_addresses(token_ids, step))
        self._captured[_key(step)] = known
        return known

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states to [S, V] float32 logits."""
        return self._model.compute_logits(hidden)

    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: CachesT
    ) -> Tensor:
        """[T] token ids and [T, E] states to [T, E] states."""
        return self._model.draft(token_ids, hidden, step, caches)

    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] states to [S, V] float32 logits."""
        return self._model.compute_draft_logits(hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A size that is captured, on tensors at these addresses."""

    captured: Captured
    addresses: tuple[int, ...]


def _key(step: StepMetadata) -> _Key:
    return step.num_tokens, step.traffic


def _addresses(token_ids: Tensor, step: StepMetadata) -> tuple[int, ...]:
    tensors = (
        token_ids,
        step.positions,
        step.slot_mapping,
        step.cum_query_lens,
        step.seq_lens,
        step.block_table,
    )
    return tuple(tensor.data_ptr() for tensor in tensors)
