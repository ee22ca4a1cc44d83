"""One reader for all: by window, by tensor, by file, in each mode."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.worker.loading.reader import CheckpointReader
from services.worker.loading.strategy import LoadStrategy, ReadMode
from shared.errors import CheckpointError

MODES = [ReadMode.LAZY, ReadMode.PREFETCH, ReadMode.EAGER]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randint(0, 255, (3,), generator=random, dtype=torch.uint8),
        "bf16": torch.randn(64, 48, generator=random).bfloat16(),
        "f32": torch.randn(7, 5, 3, generator=random),
        "i8": torch.randint(-128, 127, (33, 16), generator=random, dtype=torch.int8),
        "i64": torch.randint(-(1 << 60), 1 << 60, (9,), generator=random),
        "fp8": torch.randn(8, 8, generator=random).to(torch.float8_e4m3fn),
        "bool": torch.rand(6, 6, generator=random) > 0.5,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def reader(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Iterator[CheckpointReader]:
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as one:
        yield one


def strategy(mode: ReadMode) -> LoadStrategy:
    return LoadStrategy(mode=mode, num_threads=2, memory_bytes=4096)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """numpy knows neither bfloat16 nor fp8."""
    words = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}
    return tensor.contiguous().view(words.get(tensor.dtype, tensor.dtype))


def test_every_tensor_is_read_as_it_was_written(
    reader: CheckpointReader, tensors: dict[str, torch.Tensor]
) -> None:
    assert reader.entries().keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = reader.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(bits(read), bits(tensor)), name


def test_a_tensor_that_was_read_belongs_to_the_caller(reader: CheckpointReader) -> None:
    first = reader.read("bf16")
    kept = first.clone()
    second = reader.read("bf16")
    second.zero_()
    assert torch.equal(first, kept)


def test_a_window_is_read(reader: CheckpointReader, tensors: dict[str, torch.Tensor]) -> None:
    window = (slice(5, 30), slice(16, 24))
    assert torch.equal(reader.read("bf16", window), tensors["bf16"][window])


def test_an_unknown_name_is_told(reader: CheckpointReader) -> None:
    with pytest.raises(CheckpointError, match=f"{reader.path}: nothing: is missing"):
        reader.read("nothing")


WINDOWS = {
    "odd": None,
    "bf16": (slice(16, 32), slice(0, 48)),
    "f32": (slice(2, 6), slice(1, 4), slice(0, 2)),
    "i8": (slice(0, 33), slice(4, 8)),
    "i64": (slice(9, 9),),
    "fp8": (slice(1, 2), slice(1, 2)),
    "bool": None,
    "scalar": None,
    "empty": None,
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_brings_the_same_windows_in_the_order_of_the_file(
    reader: CheckpointReader, tensors: dict[str, torch.Tensor], mode: ReadMode
) -> None:
    read = dict(reader.read_all(WINDOWS, strategy(mode)))
    assert list(read) == list(reader.entries())
    for name, window in WINDOWS.items():
        expected = tensors[name] if window is None else tensors[name][window]
        assert (read[name].dtype, read[name].shape) == (expected.dtype, expected.shape)
        assert torch.equal(bits(read[name]), bits(expected)), name


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_finite_is_found_in_every_mode(tmp_path: Path, mode: ReadMode) -> None:
    save_file({"a": torch.ones(4), "b": torch.tensor([1.0, float("inf")])}, tmp_path / "x")
    (tmp_path / "x").rename(tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        tensors = reader.read_all({"a": None, "b": None}, strategy(mode))
        with pytest.raises(CheckpointError, match=r"model\.safetensors: b: holds NaN or infinity"):
            dict(tensors)


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH])
def test_only_what_is_wanted_is_read(reader: CheckpointReader, mode: ReadMode) -> None:
    wanted = {"bf16": (slice(0, 16), slice(0, 48)), "i64": None}
    dict(reader.read_all(wanted, strategy(mode)))
    assert reader.num_bytes_read == 16 * 48 * 2 + 9 * 8


def test_files_without_a_wanted_tensor_are_not_read_whole(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    names = {"a": ["bf16"], "b": ["f32"]}
    for file, part in names.items():
        save_file({name: tensors[name] for name in part}, tmp_path / f"{file}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"bf16": "a.safetensors", "f32": "b.safetensors"}}'
    )
    with CheckpointReader(tmp_path) as reader:
        dict(reader.read_all({"f32": None}, strategy(ReadMode.EAGER)))
        assert reader.num_bytes_read == (tmp_path / "b.safetensors").stat().st_size


def test_closing_early_ends_the_threads(reader: CheckpointReader) -> None:
    tensors = reader.read_all(WINDOWS, strategy(ReadMode.PREFETCH))
    next(tensors)
    tensors.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("weights-")]
