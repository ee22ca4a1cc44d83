"""How many KV blocks there are: what memory allows, and at least one longest sequence.

On a CPU the budget is a setting (512 MiB by default: memory is shared with everything else on the
machine). On an NPU it is what `--gpu-memory-utilization` leaves beside the weights and the largest
step, which is run once to see what it takes.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process may still take, by the system and by its container; None if unknown."""
    free: list[int] = []
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="utf-8")
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
        free += [int(found.group(1)) * 1024] if found else []
        group = root / "sys/fs/cgroup"
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        if limit != "max":
            free.append(int(limit) - int((group / "memory.current").read_text(encoding="utf-8")))
    except OSError:
        pass  # no such file: another system, or the root of all groups
    return min(free, default=None)


def host_budget(asked: int | None, free: int | None) -> int:
    """Bytes for KV blocks on a CPU.

    Raises:
        ConfigError: The machine does not have them; it would be found out under load only.
    """
    budget = CPU_KV_CACHE_BYTES if asked is None else asked
    if free is not None and budget > free:
        raise ConfigError(
            f"--kv-cache-memory-bytes {budget} is above the {free} bytes of memory that are free"
        )
    return budget


def count_blocks(budget_bytes: int, bytes_per_block: int, max_model_len: int) -> int:
    """Blocks that fit into the budget, scratch block 0 included.

    Raises:
        ConfigError: Not even one sequence of `max_model_len` tokens fits.
    """
    needed = min_blocks(max_model_len)
    num_blocks = budget_bytes // bytes_per_block
    if num_blocks < needed:
        # Block 0 is scratch, and a sequence needs one.
        shorter = (num_blocks - 1) * BLOCK_SIZE
        lower = f" or lower --max-model-len to {shorter}" if shorter > 0 else ""
        plural = "" if num_blocks == 1 else "s"
        raise ConfigError(
            f"a KV cache of {budget_bytes} bytes holds {max(0, num_blocks)} block{plural}, and one "
            f"sequence of --max-model-len {max_model_len} needs {needed}: raise "
            f"--kv-cache-memory-bytes to {needed * bytes_per_block}{lower}"
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
