"""How many KV blocks there are: what memory allows, and at least one longest sequence.

On a CPU the budget is a setting (512 MiB by default: memory is shared with everything else on the
machine). On an NPU it is what `--gpu-memory-utilization` leaves beside the weights and the largest
step, which is run once to see what it takes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.worker.model.config import BLOCK_SIZE
from services.worker.settings import MIB
from shared.errors import ConfigError

CPU_KV_CACHE_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes on a device after the largest step was run."""

    total: int
    peak: int
    """The most this process has held, weights included."""
    others: int
    """Held by other processes and the driver."""


def count_blocks(budget_bytes: int, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks that fit into the budget, scratch block 0 included.

    Raises:
        ConfigError: Not even one sequence of `max_model_len` tokens fits.
    """
    needed = min_blocks(max_model_len)
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < needed:
        raise ConfigError(
            f"a KV cache of {budget_bytes} bytes holds {max(0, num_blocks)} blocks, and one "
            f"sequence of --max-model-len {max_model_len} needs {needed}: raise "
            f"--kv-cache-memory-bytes to {needed * bytes_per_block} or lower --max-model-len to "
            f"{max(0, (num_blocks - 1) * BLOCK_SIZE)}"
        )
    return num_blocks


def min_blocks(max_model_len: int) -> int:
    """Blocks of one longest sequence and the scratch block."""
    return -(-max_model_len // BLOCK_SIZE) + 1


def check_block_count(num_blocks: int, max_model_len: int) -> int:
    """A count given by hand, if it suffices.

    Raises:
        ConfigError: Not even one sequence of `max_model_len` tokens fits.
    """
    needed = min_blocks(max_model_len)
    if num_blocks < needed:
        raise ConfigError(
            f"--num-kv-blocks {num_blocks} is too few: one sequence of --max-model-len "
            f"{max_model_len} needs {needed}"
        )
    return num_blocks


def device_budget(use: MemoryUse, utilization: float) -> int:
    """Bytes left for KV blocks on a device."""
    return int(use.total * utilization) - use.peak - use.others


def measure_device(device: torch.device, run_largest_step: Callable[[], None]) -> MemoryUse:
    """Run the largest step and see what the device's memory says."""
    torch.accelerator.reset_peak_memory_stats(device)
    run_largest_step()
    torch.accelerator.synchronize(device)
    free, total = torch.accelerator.get_memory_info(device)
    held = torch.accelerator.memory_reserved(device)
    peak = torch.accelerator.max_memory_reserved(device)
    torch.accelerator.empty_cache()
    return MemoryUse(total=total, peak=peak, others=total - free - held)
