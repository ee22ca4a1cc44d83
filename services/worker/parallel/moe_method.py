"""How tokens reach their experts in a step, chosen from numbers that all ranks of a world share.

The order of the rules and their bounds are vLLM-Ascend's. The exchange decides shapes and
collectives, so one rank that chose for itself would leave the others waiting: whoever plans a step
chooses once for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

from services.worker.parallel.hccl import Mc2Window
from shared.errors import ConfigError

Hardware = Literal["a2", "a3", "a5", "cpu"]

_MIN_A2_RANKS: Final = 16
_MAX_A2_EXPERTS: Final = 24

MAX_MC2_TOKENS: Final[Mapping[Hardware, int]] = MappingProxyType(
    {"a2": 256, "a3": 512, "a5": 512, "cpu": 512}
)
"""Most tokens that one rank may hand to the fused operator: CANN's limits on its BS."""


class MoeMethod(StrEnum):
    """Ways of bringing tokens to experts."""

    ALLGATHER = "allgather"
    """Every rank sees all tokens and adds its experts' part."""
    ALLTOALL = "alltoall"
    """Each copy of a token is sent to its expert, in as many rows as there are."""
    MC2 = "mc2"
    """The same by one fused operator each way, in buffers of a fixed size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRules:
    """What the choice depends on."""

    hardware: Hardware
    ep_size: int
    tp_size: int
    num_experts: int
    num_experts_per_tok: int
    mc2_tokens: int
    """Tokens of the largest step that should go by the fused operator."""
    window: Mc2Window | None = None
    """Where the fused operator's tokens go; None: nowhere that bounds them."""
    forced: MoeMethod | None = None
    """One method for all steps."""

    def __post_init__(self) -> None:
        if self.forced is MoeMethod.MC2 and self.num_experts % self.ep_size:
            raise ConfigError(
                f"--moe-comm-method {self.forced}: n_routed_experts={self.num_experts} of the "
                f"model must be a multiple of the {self.ep_size} ranks that hold them"
            )

    @property
    def has_mc2(self) -> bool:
        """Whether any step goes by the fused operator."""
        if self.forced is not None:
            return self.forced is MoeMethod.MC2
        return self.takes_mc2 and self.capacity > 0

    @property
    def takes_mc2(self) -> bool:
        """Whether device and layout do, whatever the window holds."""
        if self.ep_size == 1 or self.num_experts % self.ep_size or self.hardware == "cpu":
            return False
        per_rank = self.num_experts // self.ep_size
        return self.hardware != "a2" or (
            self.ep_size >= _MIN_A2_RANKS and per_rank <= _MAX_A2_EXPERTS
        )

    @property
    def capacity(self) -> int:
        """Most tokens of a replica's step that go by the fused operator."""
        per_rank = self._wanted_per_rank
        if self.window is not None:
            per_rank = min(per_rank, self.window.most_tokens)
        return self.tp_size * per_rank

    @property
    def wanted_capacity(self) -> int:
        """The same if the window had room for all of them."""
        return self.tp_size * self._wanted_per_rank

    @property
    def needed_mib(self) -> int:
        """HCCL_BUFFSIZE with which it has; 0 where there is no window."""
        return 0 if self.window is None else self.window.needed_mib(self._wanted_per_rank)

    @property
    def _wanted_per_rank(self) -> int:
        return min(-(-self.mc2_tokens // self.tp_size), MAX_MC2_TOKENS[self.hardware])

    def choose(self, num_tokens: int) -> MoeMethod:
        """The method of a step whose largest replica has `num_tokens`."""
        if self.ep_size == 1:
            return MoeMethod.ALLGATHER
        if self.forced is not None:
            return self.forced
        if self.has_mc2 and num_tokens <= self.capacity:
            return MoeMethod.MC2
        if self.hardware == "a3" or (
            self.hardware == "a5" and self.ep_size > self.num_experts_per_tok
        ):
            return MoeMethod.ALLTOALL
        return MoeMethod.ALLGATHER

    def ladder(self, max_num_tokens: int) -> tuple[tuple[int, MoeMethod], ...]:
        """The whole choice as a table: steps of up to so many tokens go this way.

        A scheduler, which knows no devices, reads the method of a tick from it.
        """
        above = self.choose(max_num_tokens)
        if self.choose(1) is above:
            return ((max_num_tokens, above),)
        return ((self.capacity, self.choose(1)), (max_num_tokens, above))
