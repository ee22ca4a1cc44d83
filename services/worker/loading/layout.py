"""Finds the weight files of a checkpoint directory and every tensor in them.

Two families of names are known: those of float checkpoints and those of ModelSlim. Each is one file
or an index of several. The index and the files must agree on every tensor.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from services.worker.loading.files import open_regular
from services.worker.loading.header import TensorEntry, read_header
from services.worker.loading.strict_json import parse_object
from services.worker.quant.scheme import DESCRIPTION_FILE
from shared.errors import CheckpointError

_LOG = logging.getLogger(__name__)

_PLAIN = "model.safetensors"
_QUANTIZED = "quant_model_weights.safetensors"
_ROTATION = "rot.safetensors"
# Rotations for drafts of another kind; nothing that a model of ours is made of.
_OPTIONAL = "optional"
_MAX_LISTED = 50
_MAX_INDEX_BYTES = 1 << 30


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint, files in natural order and tensors in theirs.

    Raises:
        CheckpointError: A file or tensor is missing, there twice, or damaged.
    """
    file = _choose(path)
    index = _read_index(file) if file.suffix == ".json" else None
    if index is None:
        # No index names the rotation's file beside a single one.
        names = [file.name, *([_ROTATION] if _is_there(path / _ROTATION) else [])]
    else:
        names = sorted(set(index.values()), key=_natural)
    entries: dict[str, TensorEntry] = {}
    for name in names:
        for entry in read_header(path / name):
            other = entries.setdefault(entry.name, entry)
            if other is not entry:
                raise CheckpointError(
                    f"{path / name}: {entry.name}: is also in {other.file.path.name}"
                )
    if index is not None:
        _compare(path, file, index, entries)
    return entries


def fail_with(faults: list[str]) -> None:
    """Raise one error that lists the faults, if there are any; the first of very many."""
    if faults:
        rest = len(faults) - _MAX_LISTED
        more = f"\nand {rest} more" if rest > 0 else ""
        raise CheckpointError("\n".join(faults[:_MAX_LISTED]) + more)


def _choose(path: Path) -> Path:
    """The index, or the one file with weights.

    A description of quantized weights decides between the families; without one there must not be
    two. An index is followed only if a whole file beside it is one of its own.
    """
    found = {name: _family(path, name) for name in (_PLAIN, _QUANTIZED)}
    there = [name for name, file in found.items() if file is not None]
    if not there:
        raise CheckpointError(
            f"{path / _PLAIN}: is missing, and so are {_PLAIN}.index.json, {_QUANTIZED} and "
            f"{_QUANTIZED}.index.json"
        )
    if len(there) == 2 and not (path / DESCRIPTION_FILE).exists():
        raise CheckpointError(
            f"{path}: has both {_PLAIN} and {_QUANTIZED} (or their indexes) and no "
            f"{DESCRIPTION_FILE} that tells which to take; remove one of them"
        )
    chosen = found[there[-1]]
    assert chosen is not None
    if len(there) == 2:
        _LOG.info("left the float weights beside the quantized ones unread")
    return chosen


def _family(path: Path, name: str) -> Path | None:
    index, single = path / f"{name}.index.json", path / name
    if not _is_there(index):
        return single if _is_there(single) else None
    if _is_there(single) and name not in _read_index(index).values():
        raise CheckpointError(
            f"{single}: is not in the index beside it, {index.name}; remove one of them"
        )
    return index


def _is_there(file: Path) -> bool:
    """Whether the name exists, be it a link to nothing: that is a fault to be told, not a gap."""
    return file.is_symlink() or file.exists()


def _natural(name: str) -> list[tuple[int, str]]:
    """Key that sorts part 10 behind part 9."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _read_index(file: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        values = parse_object(_read_text(file))
    except ValueError as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from error
    weight_map = values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: must have a weight_map from tensor names to file names")
    seen: set[str] = set()  # a few hundred files for a few hundred thousand tensors
    for name, target in weight_map.items():
        if isinstance(target, str) and target in seen:
            continue
        if not _is_name_beside(target):
            raise CheckpointError(
                f"{file}: {name!r}: weight_map names {target!r}, must be a file beside the index"
            )
        seen.add(target)
    unread = {target for target in seen if PurePosixPath(target).parts[0] == _OPTIONAL}
    return {name: target for name, target in weight_map.items() if target not in unread}


def _read_text(file: Path) -> bytes:
    descriptor, facts = open_regular(file)
    with open(descriptor, "rb") as stream:
        if facts.num_bytes > _MAX_INDEX_BYTES:
            raise CheckpointError(f"{file}: has {facts.num_bytes} bytes, no index is so long")
        try:
            return stream.read()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error


def _is_name_beside(target: object) -> bool:
    """Whether it names a file in the directory, or in its folder of optional ones."""
    if not isinstance(target, str) or not target.isprintable():
        return False
    parts = PurePosixPath(target).parts
    is_plain = "/".join(parts) == target and ".." not in parts and "/" not in parts
    return is_plain and (len(parts) == 1 or (len(parts) == 2 and parts[0] == _OPTIONAL))


def _compare(
    path: Path, file: Path, index: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> None:
    """Hold the index against the headers of its files."""
    faults = []
    for name, target in index.items():
        entry = entries.get(name)
        if entry is None or entry.file.path.name != target:
            faults.append(f"{path / target}: {name}: is in {file.name}, not in the file")
    faults += [
        f"{entry.file.path}: {name}: is in the file, not in {file.name}"
        for name, entry in entries.items()
        if name not in index
    ]
    fail_with(faults)
