"""The whole model, or one pipeline stage of it: embeddings, layers, final norm, head."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.kv_cache import KVCaches
from services.worker.model.layer import DecoderLayer
from services.worker.model.linear import Linear
from services.worker.model.metadata import StepMetadata
from services.worker.model.mtp import MTPLayer
from services.worker.model.norm import RMSNorm
from services.worker.model.projections import check_is_float
from services.worker.model.rope import RotaryTables
from services.worker.model.shards import Cut, Shards
from services.worker.model.slots import WeightSlot, plain_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.stages import StageSeam
from services.worker.model.step import StepInputs
from services.worker.model.vocabulary import make_embedding, whole_vocabulary

_EMBEDDINGS = "model.embed_tokens"


class Decoder:
    """GLM-5.2 for one rank. One thread calls it; it owns weights, never caches."""

    def __init__(self, spec: ModelSpec) -> None:
        config, placement = spec.config, spec.placement
        placement.check(config)
        self.spec = spec
        self.config = config
        self.dtype = spec.dtype
        self.device = spec.device
        has_mtp = spec.has_mtp and placement.is_last_stage(config)
        self._is_first = placement.is_first_stage()
        has_embeddings = has_mtp or self._is_first
        self.embed_tokens = make_embedding(spec, _EMBEDDINGS) if has_embeddings else None
        self.layers = [DecoderLayer(spec, layer) for layer in placement.layers(config)]
        self.norm: RMSNorm | None = None
        self.lm_head: Linear | None = None
        if placement.is_last_stage(config):
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, spec.dtype, spec.device)
            name = _EMBEDDINGS if config.tie_word_embeddings else "lm_head"
            check_is_float(spec, "", name)
            parts = {name: config.vocab_size}
            shards = Shards.cut(placement, "", parts, config.hidden_size, Cut.OUTPUTS)
            self.lm_head = Linear(shards, spec.dtype, spec.device)
        self.mtp = MTPLayer(spec) if has_mtp else None
        self._seam = StageSeam(spec)
        self._whole_vocabulary = whole_vocabulary(spec)
        self.rotary = RotaryTables(
            dim=config.qk_rope_head_dim,
            theta=config.rope_theta,
            max_positions=spec.num_positions,
            dtype=spec.dtype,
            device=spec.device,
        )

    @classmethod
    def build(cls, spec: ModelSpec) -> "Decoder":
        """A decoder with unset weights; `services.worker.loading` fills them."""
        return cls(spec)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, step: StepMetadata, caches: KVCaches) -> Tensor:
        """Run one step through the layers that are here.

        Args:
            token_ids: [T] tokens of the step.
            step: Where they belong.
            caches: KV caches, written at the step's slots.

        Returns:
            [T, E] hidden states after the final norm; on a stage before the last, which passes them
            on, those after its last layer.
        """
        assert token_ids.shape == (step.num_tokens,)
        inputs = StepInputs.prepare(step, self.rotary, self.spec)
        stream = inputs.stream
        residual: Tensor | None = None
        if self._is_first:
            assert self.embed_tokens is not None
            x = self.embed_tokens(token_ids, stream)
            topk = x.new_empty(0)  # the first layer has an indexer and sets it
        else:
            x, residual, topk = self._seam.receive(inputs)
        for layer, cache in zip(self.layers, caches.layers, strict=False):
            x, residual, topk = layer(x, residual, inputs, cache, topk)
        assert residual is not None
        if self.norm is not None:
            return stream.whole(self.norm.add(x, residual)[0])
        self._seam.send(x, residual, topk)
        return x

    @torch.inference_mode()
    def begin(self, token_ids: Tensor, step: StepMetadata, caches: KVCaches) -> tuple[Tensor, ...]:
        """Run one step up to the attention of the last layer, whose caches are written too.

        For a whole model on one rank. Where few tokens are sampled, as in a prompt, `end` saves
        most of that layer.

        Returns:
            What `end` needs of each token, [T, ..] each.
        """
        inputs = StepInputs.prepare(step, self.rotary, self.spec)
        assert self.embed_tokens is not None
        x, residual = self.embed_tokens(token_ids, inputs.stream), None
        topk = x.new_empty(0)
        *layers, last = self.layers
        for layer, cache in zip(layers, caches.layers, strict=False):
            x, residual, topk = layer(x, residual, inputs, cache, topk)
        residual, queries = last.write(x, residual, inputs, caches.layers[len(layers)])
        shared = () if last.self_attn.indexer is not None else (topk,)
        return (residual, *shared, *queries)

    @torch.inference_mode()
    def end(self, state: tuple[Tensor, ...], step: StepMetadata, caches: KVCaches) -> Tensor:
        """The rest of a step for some of its tokens.

        Args:
            state: Their rows of what `begin` returned.
            step: A step of those tokens, by `StepMetadata.of_tokens`.
            caches: KV caches, written already.

        Returns:
            [S, E] hidden states, the same bits as `forward` gives for those tokens.
        """
        assert self.norm is not None
        inputs = StepInputs.prepare(step, self.rotary, self.spec)
        last, cache = self.layers[-1], caches.layers[len(self.layers) - 1]
        residual, *rest = state
        topk = residual.new_empty(0) if last.self_attn.indexer is not None else rest.pop(0)
        x, residual, _ = last.finish(residual, tuple(rest), inputs, cache, topk)
        return self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] hidden states -> [S, V] float32 logits."""
        assert self.lm_head is not None
        return self._whole_vocabulary(self.lm_head(hidden)).float()

    @torch.inference_mode()
    def draft(
        self, token_ids: Tensor, hidden: Tensor, step: StepMetadata, caches: KVCaches
    ) -> Tensor:
        """Run the MTP layer over some positions of a step.

        Args:
            token_ids: [T] the token behind each position.
            hidden: [T, E] what `forward` or this method returned for each position.
            step: Where the positions belong.
            caches: KV caches; those of the MTP layer are written.

        Returns:
            [T, E] for `compute_draft_logits`, and for this method at the positions behind these.
        """
        assert token_ids.shape == (step.num_tokens,)
        assert self.embed_tokens is not None
        assert self.mtp is not None
        inputs = StepInputs.prepare(step, self.rotary, self.spec)
        stream = inputs.stream
        embedded = self.embed_tokens(token_ids, stream)
        # As the layer was trained: at position 0 it sees the hidden state alone.
        is_first = stream.cut(step.positions)[:, None] == 0
        embedded = embedded.masked_fill(is_first, 0)
        cache = caches.layers[len(self.layers)]
        return stream.whole(self.mtp(embedded, stream.cut(hidden), inputs, cache))

    @torch.inference_mode()
    def compute_draft_logits(self, hidden: Tensor) -> Tensor:
        """[S, E] results of `draft` -> [S, V] float32 logits."""
        assert self.mtp is not None
        head = self.mtp.shared_head or self.lm_head
        assert head is not None
        return self._whole_vocabulary(head(hidden)).float()

    def slots(self) -> Iterator[WeightSlot]:
        """Every checkpoint tensor this rank takes."""
        embeddings = {} if self.embed_tokens is None else self._by_name(self.embed_tokens.slots())
        head = {} if self.lm_head is None else self._by_name(self.lm_head.slots())
        for name in embeddings.keys() & head.keys():
            embeddings[name] = embeddings[name].also(head.pop(name))
        yield from embeddings.values()
        for layer in self.layers:
            yield from layer.slots()
        if self.norm is not None:
            yield plain_slot("model.norm.weight", self.norm.weight)
        yield from head.values()
        if self.mtp is not None:
            yield from self.mtp.slots()

    @staticmethod
    def _by_name(slots: Iterator[WeightSlot]) -> dict[str, WeightSlot]:
        return {slot.name: slot for slot in slots}

    def finish_loading(self) -> None:
        """Bring loaded weights into the form that operators want; call once, when all are in."""
        for layer in self.layers:
            layer.finish_loading()
        if self.lm_head is not None:
            self.lm_head.finish_loading()
        if self.mtp is not None:
            self.mtp.finish_loading()
