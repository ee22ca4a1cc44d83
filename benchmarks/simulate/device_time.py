"""How long a step takes: a roofline of the device, or a line fitted to a measured run."""

from dataclasses import dataclass
from typing import Protocol

from benchmarks.simulate.hardware import (
    COMPUTE_SHARE,
    EAGER_LAYER_S,
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
    num_padded_tokens: int = 0
    """Computed beside the others, to no use: a captured step has a fixed size."""
    num_world_tokens: int = 0
    """Tokens that all replicas of a world bring to its experts; 0 if this one is alone."""
    num_exchanged_tokens: int = 0
    """Tokens that each of them sends to experts, padded to the same number."""
    num_draft_passes: int = 0
    """Passes of the draft layer after the step."""
    is_eager: bool = False
    """Whether the host launches each kernel: no captured step holds this one."""


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
        num_drafts: That a decoding row may bring into a step.
        world_size: Replicas that step together.
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
        num_drafts: int = 0,
        world_size: int = 1,
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
            num_speculative_tokens=num_drafts,
            data_parallel_size=world_size,
            # How tokens reach experts is not modelled: one method for any number.
            moe_methods=((max_num_batched_tokens, 1),),
            captured_num_seqs=(1, 2, 4, *range(8, max_num_seqs + 1, 8)),
        )

    def seconds(self, work: StepWork) -> float:
        """Duration of a step."""
        computing = self._operations_of(work) / self._operations
        reading = self._bytes_of(work) / self._bytes
        working = max(computing, reading) + self._exchange_s(work)
        step = working + self._fixed_s()
        if work.is_eager:
            step = max(step, STEP_S + self._sizes.num_layers * EAGER_LAYER_S)
        return step + work.num_draft_passes * self._draft_pass_s(working)

    def _draft_pass_s(self, working_s: float) -> float:
        """One layer more for the same rows, and the head for each of them."""
        head_s = self._sizes.head_weights * self._dense_bytes / self._num_devices / self._bytes
        return working_s / self._sizes.num_layers + head_s + KERNEL_S

    def _operations_of(self, work: StepWork) -> float:
        """Operations of each device: its share of a token's own weights, and of all experts."""
        if not work.num_tokens + work.num_padded_tokens:
            return 0.0
        sizes, num_tokens = self._sizes, work.num_tokens + work.num_padded_tokens
        context = work.num_context_tokens / max(1, work.num_tokens)
        own = float(num_tokens * 2 * sizes.dense_weights)
        own += work.num_tokens * sizes.attention_operations(context)
        routed = 2 * sizes.routed_weights
        if work.num_world_tokens:
            experts = work.num_world_tokens * routed / self._num_expert_devices
        else:  # the others are like this one
            experts = num_tokens * routed / self._num_devices
        return own / self._num_devices + experts

    def _bytes_of(self, work: StepWork) -> float:
        """Bytes that each device reads; the caches of latents are whole on every device."""
        sizes = self._sizes
        num_routed = work.num_world_tokens or work.num_tokens
        untouched = (1 - sizes.num_active_experts / sizes.num_experts) ** num_routed
        experts = sizes.num_sparse_layers * sizes.num_experts * sizes.expert_weights
        experts_read = experts * (1 - untouched) * self._expert_bytes / self._num_expert_devices
        dense_read = sizes.dense_weights * self._dense_bytes / self._num_devices
        num_decoding = work.num_tokens - work.num_prompt_tokens
        if not num_decoding:
            return experts_read + dense_read
        context = work.num_context_tokens / max(1, work.num_tokens)
        caches = num_decoding * sizes.attention_values(context) * self._cache_bytes
        return experts_read + dense_read + caches

    def _exchange_s(self, work: StepWork) -> float:
        """Two sums over the devices of each layer; two exchanges of tokens of each sparse one."""
        sizes, share = self._sizes, (self._num_devices - 1) / self._num_devices
        num_tokens = work.num_tokens + work.num_padded_tokens
        bytes_per_sum = 2 * num_tokens * sizes.hidden * 2 * share
        per_layer = 2 * (bytes_per_sum / self._link + EXCHANGE_S)
        num_routed = work.num_exchanged_tokens or num_tokens
        routed = num_routed * sizes.num_active_experts * sizes.hidden * 1.5
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
