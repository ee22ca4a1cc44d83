"""The MTP layer (index ``num_hidden_layers``): its weights on this rank.

Drafting is not part of this version: a worker checks the layer's tensors against these slots and
leaves them in the file, so that a damaged or foreign tensor is still told apart.
"""

from collections.abc import Iterator

from services.worker.model.layer import DecoderLayer
from services.worker.model.norm import RMSNorm
from services.worker.model.projections import make_float_projection
from services.worker.model.slots import WeightSlot, ignored_slots, plain_slot
from services.worker.model.spec import ModelSpec


class MTPLayer:
    """A decoder layer over the embedding of the next token beside the hidden state of this one.

    Embeddings and head are the main model's; copies of them in the checkpoint are not read.
    """

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

    def slots(self) -> Iterator[WeightSlot]:
        """Checkpoint tensors of the layer."""
        prefix, config = self._prefix, self._config
        yield plain_slot(f"{prefix}enorm.weight", self.enorm.weight)
        yield plain_slot(f"{prefix}hnorm.weight", self.hnorm.weight)
        yield from self.eh_proj.slots()
        yield from self.layer.slots()
        yield plain_slot(f"{prefix}shared_head.norm.weight", self.shared_head_norm.weight)
        shape = (config.vocab_size, config.hidden_size)
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        yield from ignored_slots({f"{prefix}{name}": shape for name in copies})
