"""Where one rank stands among all: which layers, heads, columns and experts it holds.

Pipeline stages hold whole layers. Within a stage the attention and the dense MLPs are cut over the
tensor-parallel ranks; experts are whole on one rank of the expert-parallel group, or cut as the
dense MLPs are where expert parallelism is off. The latent cache and what writes it are on every
rank: all heads read the same latent.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.model.config import ModelConfig
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank's place; the default is a model on one device."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    """1: expert parallelism is off, experts are cut over the tensor-parallel ranks."""
    ep_rank: int = 0
    first_layer: int = 0
    last_layer: int | None = None
    """One past the stage's last layer; None: all layers from `first_layer` on."""
    is_dsa_cp: bool = False
    """Whether tokens, not heads, are cut inside attention: head projections are whole then."""
    is_flashcomm: bool = False
    """Whether tokens are cut between blocks too: sums are scattered, not given to all ranks."""

    def __post_init__(self) -> None:
        for size, rank in (("tp_size", "tp_rank"), ("ep_size", "ep_rank")):
            bound = getattr(self, size)
            if not 0 <= getattr(self, rank) < bound:
                raise ConfigError(f"{rank}={getattr(self, rank)}: must be below {size}={bound}")

    def check(self, config: ModelConfig) -> None:
        """Refuse sizes of the model that cannot be cut this way.

        Raises:
            ConfigError: A size does not divide, or a stage lies outside the model.
        """
        cut = {
            "num_attention_heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
        }
        if not self.has_whole_shared_experts:
            shared = config.moe_intermediate_size * config.n_shared_experts
            cut["shared expert width"] = shared
        if self.ep_size == 1:
            cut["moe_intermediate_size"] = config.moe_intermediate_size
        for name, size in cut.items():
            if size % self.tp_size:
                raise ConfigError(f"{name}={size} cannot be cut over tp_size={self.tp_size} ranks")
        if self.ep_size > config.n_routed_experts:
            raise ConfigError(
                f"ep_size={self.ep_size} is above n_routed_experts={config.n_routed_experts}"
            )
        if not 0 <= self.first_layer < self.end(config) <= config.num_hidden_layers:
            raise ConfigError(
                f"layers {self.first_layer} to {self.end(config)} are not a stage of "
                f"num_hidden_layers={config.num_hidden_layers}"
            )

    def end(self, config: ModelConfig) -> int:
        """One past the stage's last layer."""
        return config.num_hidden_layers if self.last_layer is None else self.last_layer

    def layers(self, config: ModelConfig) -> range:
        """The stage's decoder layers."""
        return range(self.first_layer, self.end(config))

    def is_first_stage(self) -> bool:
        """Whether the embeddings are here."""
        return self.first_layer == 0

    def is_last_stage(self, config: ModelConfig) -> bool:
        """Whether the final norm, the head and the MTP layer are here."""
        return self.end(config) == config.num_hidden_layers

    @property
    def token_multiple(self) -> int:
        """Tokens of a captured step are a multiple of it: ranks that cut them share evenly."""
        return self.tp_size if self.is_dsa_cp or self.is_flashcomm else 1

    @property
    def has_whole_shared_experts(self) -> bool:
        """Whether shared experts are whole: tokens that are cut stay where they are."""
        return self.is_flashcomm and self.ep_size > 1

    def share(self, size: int) -> slice:
        """This rank's part of `size` equal things cut over the tensor-parallel ranks.

        The last ranks get fewer where the sizes do not divide (rows of a vocabulary).
        """
        part = self.largest_share(size)
        return slice(min(size, self.tp_rank * part), min(size, (self.tp_rank + 1) * part))

    def largest_share(self, size: int) -> int:
        """Size of the largest rank's part, and of every rank's buffer."""
        return -(-size // self.tp_size)

    def head_share(self, heads: int) -> slice:
        """This rank's heads."""
        return slice(0, heads) if self.is_dsa_cp else self.share(heads)

    def experts(self, count: int) -> range:
        """This rank's experts: a contiguous run, one more on the first ranks if uneven."""
        part, rest = divmod(count, self.ep_size)
        first = self.ep_rank * part + min(self.ep_rank, rest)
        return range(first, first + part + (self.ep_rank < rest))

    def expert_share(self, width: int) -> slice:
        """This rank's part of the inner width of each of its experts."""
        return self.share(width) if self.ep_size == 1 else slice(0, width)


WHOLE = Placement()
"""A model on one device."""
