"""Bytes of the KV caches: per token, per block, and how many sequences that makes.

Every tensor-parallel rank keeps the rows of all tokens, as all heads read the same latent. Decode
context parallelism divides the latent rows over ranks; indexer keys stay whole on each, since a
selection looks at the entire history.
"""

from dataclasses import dataclass

from services.worker.kv_cache import LATENT, PACKED, ROPE, cached_layers, describe_cache_groups
from services.worker.model.config import BLOCK_SIZE
from services.worker.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """What a token costs in all layers of one rank."""

    latent: int
    """Of latents and rotated keys."""
    indexer: int
    num_layers: int
    decode_context_parallel_size: int = 1

    @property
    def per_token(self) -> int:
        """Bytes of one token on a rank that keeps all of them."""
        return self.latent + self.indexer

    @property
    def latent_row(self) -> int:
        """Bytes of one token's latent and rotated key in one layer."""
        return self.latent // self.num_layers

    @property
    def tokens_per_block(self) -> int:
        """Tokens behind one block id; a rank keeps the latent rows of 128 of them."""
        return BLOCK_SIZE * self.decode_context_parallel_size

    @property
    def per_block(self) -> int:
        """Bytes of one block id on a rank."""
        return BLOCK_SIZE * self.latent + self.tokens_per_block * self.indexer

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of one sequence."""
        return -(-num_tokens // self.tokens_per_block)


def cache_bytes(spec: ModelSpec, decode_context_parallel_size: int = 1) -> CacheBytes:
    """What a token costs in the layers of a rank."""
    latent = indexer = 0
    for group in describe_cache_groups(spec):
        if group.name in {LATENT, ROPE, PACKED}:
            latent += group.bytes_per_token
        else:
            indexer += group.bytes_per_token
    return CacheBytes(
        latent=latent,
        indexer=indexer,
        num_layers=len(cached_layers(spec)),
        decode_context_parallel_size=decode_context_parallel_size,
    )
