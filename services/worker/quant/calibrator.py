"""Runs prompts through the float model one layer at a time, and tells what each layer's inputs are.

Only one layer's weights are in memory. Between layers the prompts' hidden states are kept; they are
those of the float model: feeding each layer what the quantized ones before it give changed nothing
that could be measured on glm-nano.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.worker.capacity import free_host_bytes
from services.worker.kv_cache import LayerCache, allocate
from services.worker.loading.reader import CheckpointReader
from services.worker.loading.strategy import LoadStrategy
from services.worker.model.config import BLOCK_SIZE
from services.worker.model.layer import DecoderLayer
from services.worker.model.metadata import StepMetadata
from services.worker.model.rope import RotaryTables
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs
from services.worker.quant.observer import LayerInputs
from services.worker.quant.recipe import Recipe

MAX_STEP_TOKENS = 4096
"""Most tokens that go through a layer at once, and of one prompt."""

_EMBEDDINGS = "model.embed_tokens.weight"


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Prompts that go through a layer together, and where they are."""

    step: StepInputs
    num_blocks: int
    hidden: Tensor
    residual: Tensor | None
    topk: Tensor


class Calibrator:
    """Prompts on their way through the layers, the first one first."""

    def __init__(
        self,
        reader: CheckpointReader,
        spec: ModelSpec,
        recipe: Recipe,
        prompts: Sequence[Sequence[int]],
    ) -> None:
        """Look up the embeddings of `prompts`, each of 1 to `MAX_STEP_TOKENS` token ids."""
        self._reader = reader
        self._spec = spec
        self._recipe = recipe
        config = spec.config
        rotary = RotaryTables(
            dim=config.qk_rope_head_dim,
            theta=config.rope_theta,
            max_positions=max(map(len, prompts)),
            dtype=spec.dtype,
            device=spec.device,
        )
        embeddings = reader.read(_EMBEDDINGS)
        self._batches = [_start(batch, embeddings, rotary, spec) for batch in _together(prompts)]

    @torch.inference_mode()
    def run(self, index: int) -> LayerInputs:
        """Take the prompts through the next layer, and tell what its matrices were given."""
        layer = self._load(index)
        cache = self._allocate(index)
        inputs = LayerInputs(layer, self._recipe)
        with inputs.observer():
            for batch in self._batches:
                batch.hidden, batch.residual, batch.topk = layer(
                    batch.hidden, batch.residual, batch.step, cache, batch.topk
                )
        inputs.finish()
        return inputs

    def _load(self, index: int) -> DecoderLayer:
        """The layer alone, with its weights."""
        layer = DecoderLayer(self._spec, index)
        self._fill(layer)
        # With the slots gone nobody holds the weights as read, which packing replaces.
        layer.finish_loading()
        return layer

    def _fill(self, layer: DecoderLayer) -> None:
        slots = {slot.name: slot for slot in layer.slots()}
        entries = self._reader.entries()
        windows = {name: slot.window for name, slot in slots.items() if name in entries}
        num_bytes = sum(entries[name].num_bytes for name in windows)
        strategy = LoadStrategy().resolve(num_bytes, free_host_bytes())
        with closing(self._reader.read_all(windows, strategy)) as tensors:
            for name, tensor in tensors:
                slots[name].store(tensor)

    def _allocate(self, index: int) -> LayerCache:
        """Caches of the one layer; each batch writes over those of the one before."""
        placement = replace(self._spec.placement, first_layer=index, last_layer=index + 1)
        num_blocks = max(batch.num_blocks for batch in self._batches)
        return allocate(replace(self._spec, placement=placement), num_blocks).layers[0]


def _together(prompts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Prompts in order, as many at once as fit into a step."""
    batch: list[Sequence[int]] = []
    num_tokens = 0
    for prompt in prompts:
        assert 0 < len(prompt) <= MAX_STEP_TOKENS
        if batch and num_tokens + len(prompt) > MAX_STEP_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(prompt)
        num_tokens += len(prompt)
    yield batch


def _start(
    prompts: Sequence[Sequence[int]], embeddings: Tensor, rotary: RotaryTables, spec: ModelSpec
) -> _Batch:
    step, num_blocks = prefill_step(prompts)
    token_ids = torch.tensor([token for prompt in prompts for token in prompt])
    hidden = embeddings[token_ids].to(spec.dtype)
    return _Batch(
        step=StepInputs.prepare(step, rotary),
        num_blocks=num_blocks,
        hidden=hidden,
        residual=None,
        topk=hidden.new_empty(0),
    )


def prefill_step(prompts: Sequence[Sequence[int]]) -> tuple[StepMetadata, int]:
    """A step of whole prompts, and how many blocks it takes with the scratch block."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    table = torch.zeros((len(prompts), max(blocks)), dtype=torch.int32)
    positions, slots, first = [], [], 1
    for row, (prompt, count) in enumerate(zip(prompts, blocks, strict=True)):
        table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
        place = torch.arange(len(prompt))
        positions.append(place)
        slots.append(place + first * BLOCK_SIZE)  # a prompt's blocks lie side by side
        first += count
    metadata = StepMetadata(
        num_tokens=int(lengths.sum()),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots).to(torch.int32),
        cum_query_lens=lengths.cumsum(0, dtype=torch.int32),
        seq_lens=lengths,
        block_table=table,
    )
    return metadata, first
