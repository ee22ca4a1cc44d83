"""How long a step takes: a roofline of the device, or a line fitted to a measured run."""

from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulate.hardware import (
    COMPUTE_SHARE,
    EXCHANGE_S,
    KERNEL_S,
    LINK_SHARE,
    MEMORY_SHARE,
    RESERVED_BYTES,
    STEP_S,
    Device,
)
from benchmarks.simulate.sizes import SCHEMES, ModelSizes
from services.scheduler.plan import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a plan orders: rows, and every token's place in its context."""

    num_rows: int
    num_tokens: int
    num_context_tokens: int
    """Sum over all tokens of the length of what they attend to."""
    num_prompt_tokens: int
    num_prompt_context_tokens: int = 0
    """The part of the tokens of prompts in the sum."""


class DeviceModel(Protocol):
    """A replica's device."""

    @property
    def capacity(self) -> Capacity:
        """What it can hold."""
        ...

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        ...


class Roofline:
    """A replica of GLM-5.2: dense weights cut over its devices, experts over all of a world.

    A step takes as long as the slower of computing and reading, and then its exchanges.

    Args:
        sizes: Of the model.
        device: Of the hardware.
        scheme: Bytes of weights and caches.
        num_devices: Of the replica (tensor parallel).
        num_expert_devices: That experts are spread over (expert parallel).
        max_num_seqs: Most rows of a step.
        max_num_batched_tokens: Most tokens of a step.
        share_of_blocks: Part of the cache that is there, to see it run short.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        device: Device,
        scheme: str,
        *,
        num_devices: int,
        num_expert_devices: int,
        max_num_seqs: int = 128,
        max_num_batched_tokens: int = 8192,
        share_of_blocks: float = 1.0,
    ) -> None:
        """Work out what a step reads whatever it does, and how many blocks there are."""
        self._sizes = sizes
        self._device = device
        self._dense_bytes, self._expert_bytes, self._cache_bytes = SCHEMES[scheme]
        self._num_devices = num_devices
        self._num_expert_devices = num_expert_devices
        operations = device.bf16_flops if scheme == "bf16" else device.int8_ops
        self._operations = operations * COMPUTE_SHARE
        self._bytes = device.memory_bytes_per_s * MEMORY_SHARE
        self._link = device.link_bytes_per_s * LINK_SHARE
        self.capacity = Capacity(
            num_blocks=round(share_of_blocks * self._num_blocks(128)),
            block_size_tokens=128,
            num_rows=2 * max_num_seqs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=202_752,
        )

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        computing = self._operations_of(work) / (self._operations * self._num_devices)
        reading = self._bytes_of(work) / self._bytes
        return max(computing, reading) + self._exchange_s(work) + self._fixed_s()

    def _operations_of(self, work: StepWork) -> float:
        if not work.num_tokens:
            return 0.0
        context = work.num_context_tokens / work.num_tokens
        per_token = 2 * self._sizes.num_active_weights + self._sizes.attention_operations(context)
        return work.num_tokens * per_token

    def _bytes_of(self, work: StepWork) -> float:
        """Bytes that each device reads; the caches of latents are whole on every device."""
        sizes = self._sizes
        untouched = (1 - sizes.num_active_experts / sizes.num_experts) ** work.num_tokens
        experts = sizes.num_sparse_layers * sizes.num_experts * sizes.expert_weights
        experts_read = experts * (1 - untouched) * self._expert_bytes / self._num_expert_devices
        dense_read = sizes.dense_weights * self._dense_bytes / self._num_devices
        num_decoding = work.num_tokens - work.num_prompt_tokens
        if not num_decoding:
            return experts_read + dense_read
        context = work.num_context_tokens / work.num_tokens
        caches = num_decoding * sizes.attention_values(context) * self._cache_bytes
        return experts_read + dense_read + caches

    def _exchange_s(self, work: StepWork) -> float:
        """Two sums over the devices of each layer; two exchanges of tokens of each sparse one."""
        sizes, share = self._sizes, (self._num_devices - 1) / self._num_devices
        bytes_per_sum = 2 * work.num_tokens * sizes.hidden * 2 * share
        per_layer = 2 * (bytes_per_sum / self._link + EXCHANGE_S)
        routed = work.num_tokens * sizes.num_active_experts * sizes.hidden * 1.5
        per_sparse = 2 * (routed / self._num_devices / self._link + EXCHANGE_S)
        return sizes.num_layers * per_layer + sizes.num_sparse_layers * per_sparse

    def _fixed_s(self) -> float:
        return STEP_S + self._sizes.num_layers * KERNEL_S

    def _num_blocks(self, block_size: int) -> int:
        sizes = self._sizes
        experts = sizes.num_sparse_layers * sizes.num_experts * sizes.expert_weights
        weights = sizes.dense_weights * self._dense_bytes / self._num_devices
        weights += experts * self._expert_bytes / self._num_expert_devices
        free = self._device.memory_bytes - RESERVED_BYTES - weights
        num_blocks = int(free / (sizes.cache_values * self._cache_bytes * block_size))
        if num_blocks < 2:
            raise SystemExit(
                f"the weights leave {free / 2**30:.1f} GiB of a device's memory: more devices, "
                "or a smaller scheme"
            )
        return num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Seconds of a step as a sum of what it has: fitted to a run (`calibrate.py`)."""

    capacity: Capacity
    per_step_s: float
    per_row_s: float
    per_prompt_token_s: float
    per_context_token_s: float = 0.0
    """For each token of a prompt and each of those that it attends to."""
    per_row_context_token_s: float = 0.0
    """The same of a row that decodes."""

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        return (
            self.per_step_s
            + self.per_row_s * work.num_rows
            + self.per_prompt_token_s * work.num_prompt_tokens
            + self.per_context_token_s * work.num_prompt_context_tokens
            + self.per_row_context_token_s
            * (work.num_context_tokens - work.num_prompt_context_tokens)
        )
