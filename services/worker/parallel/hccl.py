"""Buffers of HCCL's communicators: how large they are, and what of a fused exchange they hold.

The fused operators (MC2) send tokens through a window in the buffer of a communicator of their
own, whose size is that of the environment. CANN's pages of the operators say what it must hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shared.errors import ConfigError

DEFAULT_HCCL_MIB: Final = 200
"""HCCL_BUFFSIZE when unset; a communicator takes twice as much, to send and to receive."""
DP_HCCL_MIB: Final = 50
"""Buffer of the data-parallel group: all-gathers of small steps."""
_MIB: Final = 1 << 20


def read_buffer_mib(environment: Mapping[str, str]) -> int:
    """HCCL_BUFFSIZE.

    Raises:
        ConfigError: It is no size.
    """
    text = environment.get("HCCL_BUFFSIZE", "")
    if text and not (text.isdecimal() and int(text) >= 1):
        raise ConfigError(f"HCCL_BUFFSIZE={text!r}: must be a whole number of MiB, at least 1")
    return int(text) if text else DEFAULT_HCCL_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Mc2Window:
    """The window of one rank's fused exchange, by npu_moe_distribute_dispatch_v2's conditions."""

    is_a3: bool
    """On A3 there is a slot for every token of every rank and expert here, elsewhere one for every
    token and choice."""
    buffer_mib: int
    num_ranks: int
    num_experts: int
    """Of each rank."""
    num_choices: int
    num_shared_experts: int
    hidden_size: int

    @property
    def most_tokens(self) -> int:
        """Tokens of a rank that it holds."""
        room = self.buffer_mib * _MIB // 2 - self._fixed_bytes
        return max(0, room // self._token_bytes)

    def needed_mib(self, num_tokens: int) -> int:
        """Least HCCL_BUFFSIZE for so many tokens of a rank."""
        return -(-2 * (self._fixed_bytes + num_tokens * self._token_bytes) // _MIB)

    @property
    def _fixed_bytes(self) -> int:
        return 0 if self.is_a3 else 2 * _MIB

    @property
    def _token_bytes(self) -> int:
        row = 2 * self.hidden_size
        if not self.is_a3:
            return self.num_ranks * min(self.num_experts, self.num_choices) * row
        arriving = self.num_experts * self.num_ranks * _aligned(_aligned(row, 32) + 64, 512)
        returning = (self.num_choices + self.num_shared_experts) * _aligned(row, 512)
        return arriving + returning


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
