"""Reads the header of one safetensors file and holds it against the format and the file's size.

The format: 8 bytes with the header's length, the header (one JSON object: tensor name -> type,
shape and place), then the tensors' bytes without a gap. What passes here can be read without any
further check: every tensor lies inside the file, apart from all others, and fills its place.
"""

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.loading.files import WeightFile, open_regular
from services.worker.loading.stored_types import STORED_TYPES
from services.worker.loading.strict_json import parse_object
from shared.errors import CheckpointError

# The format's own limit.
MAX_HEADER_BYTES = 100_000_000
_PREFIX_BYTES = 8
# numpy's limit, and far above what a model has.
_MAX_DIMENSIONS = 32
_METADATA = "__metadata__"
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as its file's header states it."""

    name: str
    file: WeightFile
    type_name: str
    """The type's name in the header: a key of `STORED_TYPES`."""
    shape: tuple[int, ...]
    offset: int
    """Where its bytes begin in the file."""
    num_bytes: int


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """Every tensor of a file, in the order of their bytes.

    Raises:
        CheckpointError: The file cannot be read or breaks the format; names file, tensor, reason.
    """
    descriptor, file = open_regular(path)
    try:
        text = _read_text(descriptor, file)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    start = _PREFIX_BYTES + len(text)
    entries = [_parse_entry(file, start, name, value) for name, value in _parse(path, text).items()]
    entries.sort(key=lambda entry: (entry.offset, entry.num_bytes))
    _check_places(file, start, entries)
    return tuple(entries)


def _read_text(descriptor: int, file: WeightFile) -> bytes:
    if not file.num_bytes:
        raise CheckpointError(f"{file.path}: is empty")
    prefix = os.pread(descriptor, _PREFIX_BYTES, 0)
    if len(prefix) < _PREFIX_BYTES:
        raise CheckpointError(f"{file.path}: is truncated: has {len(prefix)} bytes")
    (size,) = struct.unpack("<Q", prefix)
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file.path}: is damaged or no safetensors file: header of {size} bytes, must be 2 "
            f"to {MAX_HEADER_BYTES}"
        )
    text = bytearray()
    while len(text) < size:
        part = os.pread(descriptor, size - len(text), _PREFIX_BYTES + len(text))
        if not part:
            raise CheckpointError(
                f"{file.path}: is truncated: header of {size} bytes in a file of {file.num_bytes}"
            )
        text += part
    return bytes(text)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The header's tensors; its free-form metadata is checked and dropped."""
    try:
        values = parse_object(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: header: {error}") from error
    metadata = values.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: is damaged: {_METADATA} must map names to texts")
    return values


def _parse_entry(file: WeightFile, start: int, name: str, value: object) -> TensorEntry:
    """One tensor; `start` is where the tensors' bytes begin."""
    # A name goes into messages and logs; a lone surrogate could not even be written there.
    if not name.isprintable():
        raise CheckpointError(f"{file.path}: {name!r}: is no printable name")
    where = f"{file.path}: {name}"
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise CheckpointError(f"{where}: is damaged: must have dtype, shape and data_offsets")
    stored = STORED_TYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if stored is None:
        raise CheckpointError(
            f"{where}: has type {_short(value['dtype'])}, must be one of {', '.join(STORED_TYPES)}"
        )
    shape, place = _ints(value["shape"]), _ints(value["data_offsets"])
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: is damaged: has shape {_short(value['shape'])}")
    if place is None or len(place) != 2 or place[0] > place[1]:
        raise CheckpointError(f"{where}: is damaged: lies at {_short(value['data_offsets'])}")
    num_bytes = place[1] - place[0]
    expected = math.prod(shape) * stored.num_bytes
    if num_bytes != expected:
        raise CheckpointError(
            f"{where}: is damaged: has {num_bytes} bytes, shape "
            f"{_short(list(shape))} of {value['dtype']} needs {_short(expected)}"
        )
    return TensorEntry(
        name=name,
        file=file,
        type_name=value["dtype"],
        shape=shape,
        offset=start + place[0],
        num_bytes=num_bytes,
    )


def _ints(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 on, or None."""
    if isinstance(value, list) and all(type(one) is int and one >= 0 for one in value):
        return tuple(value)
    return None


def _short(value: object) -> str:
    """A foreign value in few characters; a number of thousands of digits has no text at all."""
    try:
        text = str(value) if isinstance(value, int) else repr(value)
    except ValueError:
        return "a number beyond all bounds"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _check_places(file: WeightFile, start: int, entries: Sequence[TensorEntry]) -> None:
    """Tensors must follow each other without gap or overlap, up to the file's end."""
    end, last = start, ""
    for entry in entries:
        if entry.offset < end:
            raise CheckpointError(f"{file.path}: {entry.name}: is damaged: overlaps {last}")
        if entry.offset + entry.num_bytes > file.num_bytes:
            raise CheckpointError(
                f"{file.path}: {entry.name}: is truncated: ends at byte "
                f"{_short(entry.offset + entry.num_bytes)} of a file of {file.num_bytes}"
            )
        if entry.offset > end:
            raise CheckpointError(
                f"{file.path}: {entry.name}: is damaged: {entry.offset - end} bytes before it "
                "belong to no tensor"
            )
        end, last = entry.offset + entry.num_bytes, entry.name
    if end < file.num_bytes:
        raise CheckpointError(
            f"{file.path}: is damaged: {file.num_bytes - end} bytes at its end belong to no tensor"
        )
