"""Fills a decoder from a checkpoint, or says exactly what is wrong with it.

Headers are compared with the model first, so one error lists everything that differs before a byte
of weights is read. Of each tensor only this rank's part is read, and stored before much more is:
beside the weights there is at most the strategy's memory, or the largest part.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from torch import Tensor

from services.worker.capacity import free_host_bytes
from services.worker.loading.check import check_entries
from services.worker.loading.header import TensorEntry
from services.worker.loading.progress import LoadProgress
from services.worker.loading.reader import CheckpointReader
from services.worker.loading.room import check_room
from services.worker.loading.stored_types import STORED_TYPES
from services.worker.loading.strategy import LoadStrategy
from services.worker.model.decoder import Decoder
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

_LOG = logging.getLogger(__name__)

Report = Callable[[LoadProgress], None]


def load_model(
    path: Path | str,
    spec: ModelSpec,
    strategy: LoadStrategy | None = None,
    progress: Report | None = None,
) -> Decoder:
    """Build a decoder and fill it from a checkpoint directory.

    Args:
        path: Directory with weights in one of the layouts of `layout.py`.
        spec: What to build.
        strategy: How to read; by default as suits the machine.
        progress: Called before the first tensor and after each; what it raises ends the loading.

    Raises:
        CheckpointError: A file or tensor is missing, extra, misshapen, mistyped or damaged.
        ConfigError: There is no room for the weights.
    """
    with CheckpointReader(path) as reader:
        entries = reader.entries()
        # Before the memory of the weights is taken.
        check_entries(reader.path, entries, spec)
        check_room(spec)
        decoder = Decoder.build(spec)
        # Nobody keeps the slots: they hold the weights as read, which packing is to replace.
        _fill(
            reader,
            {slot.name: slot for slot in decoder.slots() if slot.name in entries},
            strategy or LoadStrategy(),
            progress,
        )
    decoder.finish_loading()
    return decoder


def _fill(
    reader: CheckpointReader,
    slots: Mapping[str, WeightSlot],
    strategy: LoadStrategy,
    report: Report | None,
) -> None:
    """Read every slot's part and store it."""
    entries = reader.entries()
    total_bytes = sum(_kept_bytes(entries[name], slot) for name, slot in slots.items())
    strategy = strategy.resolve(total_bytes, free_host_bytes())
    started, num_tensors, num_bytes = time.monotonic(), 0, 0

    def tell() -> None:
        if report is not None:
            progress = LoadProgress(
                num_tensors=num_tensors,
                total_tensors=len(slots),
                num_bytes=num_bytes,
                total_bytes=total_bytes,
            )
            report(progress)

    tell()
    windows = {name: slot.window for name, slot in slots.items()}
    # Closed here and not when it is collected: the threads behind it must have ended.
    with closing(reader.read_all(windows, strategy)) as tensors:
        for name, tensor in tensors:
            _store(entries[name], slots[name], tensor)
            num_tensors, num_bytes = num_tensors + 1, num_bytes + tensor.nbytes
            del tensor  # nobody keeps it, so its memory is used again
            tell()
    seconds = time.monotonic() - started
    _LOG.info(
        "weights loaded",
        extra={
            "num_tensors": num_tensors,
            "num_bytes": num_bytes,
            "num_bytes_read": reader.num_bytes_read,
            "seconds": round(seconds, 2),
            "gb_per_s": round(num_bytes / max(seconds, 1e-9) / 1e9, 2),
            "strategy": strategy.mode.value,
        },
    )


def _kept_bytes(entry: TensorEntry, slot: WeightSlot) -> int:
    return math.prod(slot.kept_shape) * STORED_TYPES[entry.type_name].num_bytes


def _store(entry: TensorEntry, slot: WeightSlot, tensor: Tensor) -> None:
    """Store a tensor; what the module finds wrong with it is told with its file."""
    try:
        slot.store(tensor)
    except CheckpointError as error:
        raise CheckpointError(f"{entry.file.path}: {error}") from error
