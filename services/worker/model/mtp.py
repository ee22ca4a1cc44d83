"""The MTP layer (index ``num_hidden_layers``), which guesses the token after the next one.

It sees the embedding of the next token beside the hidden state that led to it, and can be fed its
own output again to guess further. Embeddings and head are the main model's. A rotated checkpoint
folds the layer's last norm into a head of its own, which is then used in place of the main one.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.kv_cache import LayerCache
from services.worker.model.layer import DecoderLayer
from services.worker.model.linear import Linear
from services.worker.model.norm import RMSNorm
from services.worker.model.projections import make_float_projection
from services.worker.model.shards import Cut, Shards
from services.worker.model.slots import WeightSlot, ignored_slots, plain_slot
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs

_ROTATION = "rot"


class MTPLayer:
    """A decoder layer over the embedding of the next token beside the hidden state of this one."""

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        self._config = config
        self._prefix = prefix = f"model.layers.{config.num_hidden_layers}."
        hidden = config.hidden_size

        def norm() -> RMSNorm:
            return RMSNorm(hidden, config.rms_norm_eps, spec.dtype, spec.device)

        self.enorm, self.hnorm, self.shared_head_norm = norm(), norm(), norm()
        self.eh_proj = make_float_projection(spec, prefix, {"eh_proj": hidden}, 2 * hidden)
        self.layer = DecoderLayer(spec, config.num_hidden_layers)
        self.rot: Linear | None = None
        """Puts the final norm's factors, folded away in a rotated checkpoint, in again."""
        self.shared_head: Linear | None = None
        if spec.quantization.is_rot_used:
            self.rot = _float_product(spec, "", _ROTATION, hidden, Cut.WHOLE)
            head = "shared_head.head"
            self.shared_head = _float_product(spec, prefix, head, config.vocab_size, Cut.OUTPUTS)

    def __call__(
        self, embedded: Tensor, hidden: Tensor, step: StepInputs, cache: LayerCache
    ) -> Tensor:
        """Run the layer.

        Args:
            embedded: [.., E] embeddings of the tokens that follow; zeros at position 0.
            hidden: [.., E] states after the final norm, the main model's or this layer's own.
            step: The step, at the positions of `hidden`; both are in the form of its stream.
            cache: This layer's caches, written.

        Returns:
            [.., E] states after the layer's norm: for the head, and to be fed again.
        """
        if self.rot is not None:
            hidden = self.rot(hidden)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=1))
        x, residual, _ = self.layer(x, None, step, cache, x.new_empty(0))
        return self.shared_head_norm.add(x, residual)[0]

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of the layer."""
        prefix, config = self._prefix, self._config
        yield plain_slot(f"{prefix}enorm.weight", self.enorm.weight)
        yield plain_slot(f"{prefix}hnorm.weight", self.hnorm.weight)
        yield from self.eh_proj.slots()
        yield from self.layer.slots()
        yield plain_slot(f"{prefix}shared_head.norm.weight", self.shared_head_norm.weight)
        copies = ["embed_tokens.weight"]
        if self.rot is None or self.shared_head is None:
            copies.append("shared_head.head.weight")
        else:
            yield from self.rot.slots()
            yield from self.shared_head.slots()
        shape = (config.vocab_size, config.hidden_size)
        yield from ignored_slots({f"{prefix}{name}": shape for name in copies})

    def finish_loading(self) -> None:
        """Finish the layer and the products beside it."""
        self.layer.finish_loading()
        for product in (self.eh_proj, self.rot, self.shared_head):
            if product is not None:
                product.finish_loading()


def _float_product(spec: ModelSpec, prefix: str, name: str, size_out: int, cut: Cut) -> Linear:
    """A product with a matrix that a description need not list."""
    shards = Shards.cut(spec.placement, prefix, {name: size_out}, spec.config.hidden_size, cut)
    return Linear(shards, spec.dtype, spec.device)
