"""Reads a safetensors checkpoint into a decoder, or says exactly what is wrong with it.

Headers are compared with the model first, so one error lists every missing, extra, misshapen and
mistyped tensor before a byte of weights is read. Nothing is dropped silently: the only tensors left
in the file are those of an MTP layer, by name.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.model.decoder import Decoder
from services.worker.model.mtp import MTPLayer
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

_LOG = logging.getLogger(__name__)
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "I32": 4, "I64": 8}
_MAX_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far loading has come."""

    num_tensors: int
    total_tensors: int
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One tensor as a file's header states it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _DTYPE_BYTES.get(self.dtype, 0)


def load_model(
    path: Path | str,
    spec: ModelSpec,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Decoder:
    """Build a decoder and fill it from a checkpoint directory.

    Args:
        path: Directory with ``model.safetensors`` or an index of several files.
        spec: What to build.
        progress: Called after every tensor.

    Raises:
        CheckpointError: A file or tensor is missing, extra, misshapen, mistyped or damaged.
    """
    entries = _read_headers(Path(path))
    decoder = Decoder.build(spec)
    slots = {slot.name: slot for slot in decoder.slots()}
    _check(Path(path), entries, slots, spec)
    num_skipped = len(entries.keys() - slots.keys())
    if num_skipped:
        _LOG.info("left %d tensors of the MTP layer unloaded: drafting is off", num_skipped)
    present = {name: slot for name, slot in slots.items() if name in entries}
    _fill({name: entries[name] for name in present}, present, progress)
    decoder.finish_loading()
    return decoder


def _fill(
    entries: Mapping[str, _Entry],
    slots: Mapping[str, WeightSlot],
    progress: Callable[[LoadProgress], None] | None,
) -> None:
    total_bytes = sum(entry.num_bytes for entry in entries.values())
    num_tensors = num_bytes = 0
    for file in sorted({entry.file for entry in entries.values()}):
        with _opened(file) as tensors:
            for name in (name for name, entry in entries.items() if entry.file == file):
                _store(file, name, tensors, slots[name])
                num_tensors += 1
                num_bytes += entries[name].num_bytes
                if progress is not None:
                    progress(
                        LoadProgress(
                            num_tensors=num_tensors,
                            total_tensors=len(entries),
                            num_bytes=num_bytes,
                            total_bytes=total_bytes,
                        )
                    )


def _store(file: Path, name: str, tensors: Any, slot: WeightSlot) -> None:  # noqa: ANN401 - untyped library object
    tensor = tensors.get_slice(name)[slot.window or ...]
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{file}: {name}: holds NaN or infinity")
    slot.store(tensor)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An open safetensors file; what the library finds wrong becomes a `CheckpointError`."""
    try:
        with safe_open(str(file), framework="pt") as tensors:
            yield tensors
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: is damaged or truncated: {error}") from error


def _read_headers(path: Path) -> dict[str, _Entry]:
    """Every tensor of the checkpoint by name."""
    index = _read_index(path)
    files = sorted({path / file for file in index.values()}) if index else [path / _SINGLE]
    entries: dict[str, _Entry] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name in entries:
                    raise CheckpointError(f"{file}: {name}: is also in {entries[name].file.name}")
                header = tensors.get_slice(name)
                shape = tuple(header.get_shape())
                entries[name] = _Entry(file=file, shape=shape, dtype=header.get_dtype())
    for name, file_name in (index or {}).items():
        if name not in entries or entries[name].file.name != file_name:
            raise CheckpointError(f"{path / file_name}: {name}: is in the index, not in the file")
    return entries


def _read_index(path: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None for a checkpoint of one file."""
    file = path / _INDEX
    if not file.exists():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: has no readable weight_map: {error!r}") from error
    is_flat = isinstance(weight_map, dict) and all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    )
    if not weight_map or not is_flat:
        raise CheckpointError(f"{file}: weight_map must map tensor names to files beside it")
    return dict(weight_map)


def _check(
    path: Path,
    entries: Mapping[str, _Entry],
    slots: Mapping[str, WeightSlot],
    spec: ModelSpec,
) -> None:
    """Compare headers with the model; one error names everything that differs."""
    known = dict(slots)
    prefix = f"model.layers.{spec.config.num_hidden_layers}."
    is_known = spec.config.num_nextn_predict_layers > 0
    if is_known and any(name.startswith(prefix) for name in entries):
        layer = MTPLayer(replace(spec, device=torch.device("meta")))
        known |= {slot.name: slot for slot in layer.slots()}
    required = {name for name, slot in known.items() if slot.is_required}
    faults = [f"{path}: {name}: is missing" for name in sorted(required - entries.keys())]
    for name, entry in sorted(entries.items()):
        faults.extend(f"{entry.file}: {name}: {fault}" for fault in _faults(entry, known.get(name)))
    if faults:
        listed = "\n".join(faults[:_MAX_LISTED])
        rest = len(faults) - _MAX_LISTED
        raise CheckpointError(listed + (f"\nand {rest} more" if rest > 0 else ""))


def _faults(entry: _Entry, expected: WeightSlot | None) -> Iterator[str]:
    if expected is None:
        yield "is not part of this model"
        return
    if entry.shape != expected.shape:
        yield f"has shape {list(entry.shape)}, must be {list(expected.shape)}"
    if entry.dtype not in expected.types:
        yield f"has type {entry.dtype}, must be one of {', '.join(sorted(expected.types))}"
