"""Attention backends by (use_mla, use_sparse, use_compress); the next model family goes in here."""

from dataclasses import dataclass

from services.worker.model.attention import SparseLatentAttention
from services.worker.model.config import ModelConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BackendKey:
    """What a model's attention is made of."""

    use_mla: bool
    use_sparse: bool
    use_compress: bool


_NAMES = {
    BackendKey(True, False, False): "dense latent attention (MLA)",
    BackendKey(False, False, False): "grouped-query attention",
    BackendKey(True, True, False): "sparse latent attention (SFA)",
    BackendKey(True, False, True): "compressed sparse attention (DSA)",
}
_BUILT = {BackendKey(True, True, False): SparseLatentAttention}


def attention_backend(config: ModelConfig) -> type[SparseLatentAttention]:
    """The attention class of a model."""
    return backend_for(
        BackendKey(
            use_mla=config.kv_lora_rank > 0,
            use_sparse=config.index_topk > 0,
            use_compress=False,
        )
    )


def backend_for(key: BackendKey) -> type[SparseLatentAttention]:
    """The class built for a key; a key without one is refused by its name."""
    backend = _BUILT.get(key)
    if backend is None:
        name = _NAMES.get(key, "an attention of this kind")
        raise ConfigError(f"{name} is not built ({key})")
    return backend
