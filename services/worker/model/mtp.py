"""Names and shapes of the checkpoint's MTP layer (index ``num_hidden_layers``).

Drafting is not part of this version. The loader checks the layer's tensors against this list and
leaves them in the file, so that a damaged or foreign tensor is still told apart.
"""

from collections.abc import Iterator

import torch

from services.worker.model.config import ModelConfig
from services.worker.model.layer import DecoderLayer


def mtp_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether the tensor must be present, for every MTP tensor."""
    hidden = config.hidden_size
    for layer in range(
        config.num_hidden_layers, config.num_hidden_layers + config.num_nextn_predict_layers
    ):
        prefix = f"model.layers.{layer}."
        block = DecoderLayer(config, layer, torch.bfloat16, torch.device("meta"))
        yield from ((slot.name, slot.shape, True) for slot in block.slots(prefix))
        yield f"{prefix}enorm.weight", (hidden,), True
        yield f"{prefix}hnorm.weight", (hidden,), True
        yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden), True
        yield f"{prefix}shared_head.norm.weight", (hidden,), True
        # Some exports carry copies of the embeddings and the head; others alias the main ones.
        yield f"{prefix}embed_tokens.weight", (config.vocab_size, hidden), False
        yield f"{prefix}shared_head.head.weight", (config.vocab_size, hidden), False
