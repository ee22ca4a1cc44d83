"""How a checkpoint is read: by whom, how far ahead, into how much memory."""

import os
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import ConfigError

# Two blocks of 16 MiB for each of eight threads. More is no faster, since either reading or storing
# is the slower one; it only costs the system time to hand out (1 GiB: a third of all its time).
_MAX_MEMORY_BYTES = 256 << 20
_FREE_MEMORY_SHARE = 0.1
# Threads mostly wait for the disk: measured on two cores, reads from a cold disk are three times
# faster with four threads than with one; from the page cache more threads than cores are no help.
_MAX_THREADS = 8
_PER_CORE = 2
# Less than this is read before threads could help.
_SMALL_BYTES = 64 << 20


class ReadMode(StrEnum):
    """Values of `--safetensors-load-strategy`."""

    AUTO = "auto"
    """`PREFETCH`, or `LAZY` where there is little to read."""
    LAZY = "lazy"
    """The loading thread reads one tensor, stores it, reads the next."""
    PREFETCH = "prefetch"
    """Threads read ahead of the loading thread."""
    EAGER = "eager"
    """Threads read whole files, also what this rank does not keep: for storage that is slow at
    anything but long reads. Takes the memory of the largest file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStrategy:
    """The settings of reading; 0 means that the machine decides."""

    mode: ReadMode = ReadMode.AUTO
    num_threads: int = 0
    """Threads that read."""
    memory_bytes: int = 0
    """Most bytes that were read and not yet stored (one tensor may be larger)."""

    def __post_init__(self) -> None:
        for name in ("num_threads", "memory_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be 0 or more")

    def resolve(self, total_bytes: int, free_bytes: int | None) -> "LoadStrategy":
        """The same with everything decided.

        Args:
            total_bytes: What will be read.
            free_bytes: Memory of the machine that is free, if known.
        """
        mode = self.mode
        if mode is ReadMode.AUTO:
            mode = ReadMode.LAZY if total_bytes < _SMALL_BYTES else ReadMode.PREFETCH
        num_cores = len(os.sched_getaffinity(0))
        share = _MAX_MEMORY_BYTES if free_bytes is None else int(_FREE_MEMORY_SHARE * free_bytes)
        return LoadStrategy(
            mode=mode,
            num_threads=self.num_threads or min(_MAX_THREADS, _PER_CORE * num_cores),
            memory_bytes=self.memory_bytes or max(1, min(_MAX_MEMORY_BYTES, share)),
        )
