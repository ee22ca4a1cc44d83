"""Damage of every kind ends in one error that names the file, and the tensor where there is one.

Nothing else may come of it: no other error, no hang, no thread that stays, no weights that differ
from those written. (A bit of a weight that flips without leaving its type's numbers cannot be
seen: the format has no checksums.)
"""

import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.worker.loading.load import load_model
from services.worker.loading.progress import LoadProgress
from services.worker.loading.strategy import LoadStrategy, ReadMode
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

FILES = ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
INDEX = "model.safetensors.index.json"
PREFETCH = LoadStrategy(mode=ReadMode.PREFETCH, num_threads=2, memory_bytes=1 << 20)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    from tests.services.worker.conftest import TINY

    values: dict[str, Any] = TINY | {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
    config = ModelConfig.from_dict(values)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def whole(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint of three files."""
    folder = tmp_path_factory.mktemp("whole")
    random = torch.Generator().manual_seed(3)
    slots = list(Decoder.build(spec).slots())
    weight_map = {}
    for number, file in enumerate(FILES):
        part = slots[number::3]
        tensors = {slot.name: torch.randn(slot.shape, generator=random) for slot in part}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [one for one in threading.enumerate() if one.name.startswith("weights-")]


def original(whole: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in FILES for name, tensor in load_file(whole / file).items()}


def is_unharmed(given: dict[str, torch.Tensor], whole: Path) -> bool:
    expected = original(whole)
    return given.keys() == expected.keys() and all(
        torch.equal(given[name], tensor) for name, tensor in expected.items()
    )


def fails(folder: Path, spec: ModelSpec, *named: str) -> str:
    """Load, see it fail, and see the names in the message."""
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, spec, PREFETCH)
    text = str(caught.value)
    for name in named:
        assert name in text
    return text


def header_of(file: Path) -> tuple[int, dict[str, Any]]:
    """Bytes before the tensors, and the header."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return 8 + size, json.loads(data[8 : 8 + size])


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header and leave the tensors' bytes as they are."""
    start, header = header_of(file)
    data = file.read_bytes()[start:]
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("where", ["start", "prefix", "header", "data", "end"])
def test_a_file_cut_anywhere(folder: Path, spec: ModelSpec, file: str, where: str) -> None:
    path = folder / file
    start, header = header_of(path)
    size = path.stat().st_size
    cuts = {
        "start": [0, 1],
        "prefix": [7, 8, 9],
        "header": [start // 2, start - 1],
        "data": [start, start + 1, (start + size) // 2],
        "end": [size - 1],
    }[where]
    data = path.read_bytes()
    for cut in cuts:
        path.write_bytes(data[:cut])
        text = fails(folder, spec, str(path))
        assert "truncated" in text or "empty" in text or "damaged" in text
        if cut >= start:
            assert any(f"{path}: {name}: is truncated" in text for name in header)


@pytest.mark.parametrize("file", FILES)
def test_bytes_put_behind_the_end(folder: Path, spec: ModelSpec, file: str) -> None:
    with (folder / file).open("ab") as stream:
        stream.write(b"\0")
    fails(folder, spec, str(folder / file), "1 bytes at its end belong to no tensor")


@pytest.mark.parametrize("bit", range(64))
def test_any_bit_of_the_headers_length(folder: Path, spec: ModelSpec, bit: int) -> None:
    path = folder / FILES[bit % 3]
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)
    fails(folder, spec, str(path))


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_any_bit_of_a_header_is_seen_or_changes_nothing(
    folder: Path,
    whole: Path,
    spec: ModelSpec,
    given: dict[str, torch.Tensor],
    data: st.DataObject,
) -> None:
    file = data.draw(st.sampled_from(FILES))
    start, _ = header_of(whole / file)
    place, bit = data.draw(st.integers(8, start - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray((whole / file).read_bytes())
    damaged[place] ^= 1 << bit
    (folder / file).write_bytes(damaged)
    try:
        given.clear()
        load_model(folder, spec, PREFETCH)
    except CheckpointError as error:
        assert str(folder) in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert is_unharmed(given, whole)
    finally:
        shutil.copy(whole / file, folder / file)


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_any_change_of_the_index_is_seen_or_changes_nothing(
    folder: Path,
    whole: Path,
    spec: ModelSpec,
    given: dict[str, torch.Tensor],
    data: st.DataObject,
) -> None:
    text = (whole / INDEX).read_bytes()
    place, cut = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 60))
    put = data.draw(st.binary(max_size=3))
    (folder / INDEX).write_bytes(text[:place] + put + text[place + cut :])
    try:
        given.clear()
        load_model(folder, spec, PREFETCH)
    except CheckpointError as error:
        assert str(folder) in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert is_unharmed(given, whole)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH, ReadMode.EAGER])
def test_a_value_that_is_no_number(
    folder: Path, spec: ModelSpec, file: str, value: float, mode: ReadMode
) -> None:
    start, header = header_of(folder / file)
    names = sorted(header.keys() - {"__metadata__"})
    name = names[len(names) // 2]
    data = bytearray((folder / file).read_bytes())
    last = start + header[name]["data_offsets"][1] - 4
    data[last : last + 4] = struct.pack("<f", value)
    (folder / file).write_bytes(data)
    strategy = LoadStrategy(mode=mode, num_threads=2, memory_bytes=1 << 20)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, spec, strategy)
    assert str(caught.value) == f"{folder / file}: {name}: holds NaN or infinity"


NORM = "model.norm.weight"  # 64 float32


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH])
def test_a_disk_that_fails_under_a_tensor(
    folder: Path, spec: ModelSpec, mode: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(file for file in FILES if NORM in header_of(folder / file)[1])
    start, header = header_of(folder / file)
    place = start + header[NORM]["data_offsets"][0]
    inode, read = (folder / file).stat().st_ino, os.preadv

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == place and os.fstat(descriptor).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder, spec, LoadStrategy(mode=mode, num_threads=2))
    assert str(caught.value) == f"{folder / file}: {NORM}: cannot be read: Input/output error"


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH, ReadMode.EAGER])
def test_a_file_replaced_between_its_header_and_its_weights(
    folder: Path, spec: ModelSpec, mode: ReadMode
) -> None:
    path = folder / FILES[2]

    def replace_file(progress: LoadProgress) -> None:
        if not progress.num_tensors:
            shutil.copy(path, folder / "new")
            (folder / "new").rename(path)

    with pytest.raises(CheckpointError, match=f"{path}: was changed while it was being read"):
        load_model(folder, spec, LoadStrategy(mode=mode, num_threads=2), replace_file)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "type": (lambda one: one.update(dtype="I32"), "has type I32, must be one of BF16, F16, F32"),
    "unknown type": (lambda one: one.update(dtype="F128"), "has type 'F128', must be one of BOOL"),
    "smaller type": (lambda one: one.update(dtype="BF16"), "has 256 bytes, shape [64] of BF16"),
    "reshaped": (lambda one: one.update(shape=[8, 8]), "has shape [8, 8], must be [64]"),
    "both": (lambda one: one.update(dtype="I8", shape=[256]), "has shape [256], must be [64]"),
    "halved": (lambda one: one.update(dtype="F16", shape=[128]), "has shape [128], must be [64]"),
    "missized": (lambda one: one.update(shape=[63]), "has 256 bytes, shape [63] of F32 needs 252"),
    "moved": (
        lambda one: one.update(data_offsets=[place + 4 for place in one["data_offsets"]]),
        "is ",
    ),
    "outside": (
        lambda one: one.update(data_offsets=[place + (1 << 40) for place in one["data_offsets"]]),
        "is truncated: ends at byte ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_tensor_that_is_described_wrongly(folder: Path, spec: ModelSpec, name: str) -> None:
    change, reason = CHANGES[name]
    file = next(file for file in FILES if NORM in header_of(folder / file)[1])
    rewrite(folder / file, lambda header: change(header[NORM]))
    text = fails(folder, spec, str(folder / file), reason)
    # A tensor in a wrong place may be seen at its neighbour.
    assert NORM in text or name == "moved"


def test_a_tensor_under_another_name(folder: Path, spec: ModelSpec) -> None:
    def rename(header: dict[str, Any]) -> None:
        name = next(name for name in header if name.endswith("weight"))
        header[f"{name}s"] = header.pop(name)

    rewrite(folder / FILES[1], rename)
    fails(folder, spec, str(folder / FILES[1]), "weights: is in the file, not in")


def test_files_that_changed_places(folder: Path, spec: ModelSpec) -> None:
    (folder / FILES[0]).rename(folder / "x")
    (folder / FILES[1]).rename(folder / FILES[0])
    (folder / "x").rename(folder / FILES[1])
    fails(folder, spec, str(folder / FILES[0]), str(folder / FILES[1]), "not in the file")


def test_the_same_file_twice(folder: Path, spec: ModelSpec) -> None:
    shutil.copy(folder / FILES[0], folder / FILES[1])
    fails(folder, spec, f"{folder / FILES[1]}: ", f"is also in {FILES[0]}")


@pytest.mark.parametrize("name", [*FILES, INDEX])
@pytest.mark.parametrize("put", ["nothing", "folder", "loop", "zeros", "text"])
def test_something_else_in_the_place_of_a_file(
    folder: Path, spec: ModelSpec, name: str, put: str
) -> None:
    path = folder / name
    path.unlink()
    if put == "folder":
        path.mkdir()
    elif put == "loop":
        path.symlink_to(path)
    elif put != "nothing":
        path.write_bytes(bytes(4096) if put == "zeros" else b"version https://git-lfs\noid 1\n")
    expected = folder / "model.safetensors" if (name, put) == (INDEX, "nothing") else path
    fails(folder, spec, f"{expected}: ")


def test_another_checkpoint_beside_this_config(folder: Path, spec: ModelSpec) -> None:
    wider = replace(spec, config=replace(spec.config, hidden_size=128, n_routed_experts=40))
    text = fails(
        folder, wider, f"{folder}: model.layers.1.mlp.experts.10.up_proj.weight: is missing"
    )
    assert len(text.splitlines()) == 51
    assert text.splitlines()[-1].startswith("and ")
