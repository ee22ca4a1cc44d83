"""A header is taken only when every tensor in it can be read without another check."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from services.worker.loading.header import MAX_HEADER_BYTES, read_header
from services.worker.loading.stored_types import STORED_TYPES
from shared.errors import CheckpointError

Write = Callable[..., Path]
GOOD = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_every_tensor_of_the_library_is_found_in_the_order_of_its_bytes(file: Path) -> None:
    tensors = {
        name: torch.zeros(3, 5).to(stored.dtype)
        for name, stored in STORED_TYPES.items()
        if name != "F8_E8M0"  # zero has no such form
    } | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    save_file(tensors, file, metadata={"format": "pt"})
    entries = read_header(file)
    assert {entry.name for entry in entries} == tensors.keys()
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)
    for entry in entries:
        tensor = tensors[entry.name]
        assert entry.shape == tuple(tensor.shape)
        assert STORED_TYPES[entry.type_name].dtype == tensor.dtype
        assert entry.num_bytes == tensor.nbytes


def test_a_header_may_end_in_spaces_and_have_metadata(file: Path, write_raw: Write) -> None:
    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}   '
    (entry,) = read_header(write_raw(file, text, b"x"))
    assert (entry.name, entry.shape, entry.offset) == ("a", (), 8 + len(text))


FAULTS: dict[str, tuple[Any, str]] = {
    "text": (b"hello there", "is damaged: header: "),
    "bytes": (b"\xff\xfe{}", "is damaged: header: "),
    "list": ([1], "is damaged: header: is no JSON object"),
    "deep": (b'{"a":' + b"[" * 100_000, "is damaged: header: is nested too deeply"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", "is damaged: header: "),
    "twice": (b'{"a":{},"a":{}}', "is damaged: header: names 'a' twice"),
    "metadata": ({"__metadata__": {"a": 1}}, "is damaged: __metadata__ must map names to texts"),
    "surrogate": (b'{"\\ud800":{}}', r"'\\ud800': is no printable name"),
    "line end": ({"a\nb": GOOD}, r"'a\\nb': is no printable name"),
    "no value": ({"a": None}, "a: is damaged: must have dtype, shape and data_offsets"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 24]}}, "a: is damaged: must have"),
    "more": ({"a": GOOD | {"scale": 1}}, "a: is damaged: must have"),
    "type": ({"a": GOOD | {"dtype": "F33"}}, "a: has type 'F33', must be one of BOOL, "),
    "no type": ({"a": GOOD | {"dtype": ["F32"]}}, r"a: has type \['F32'\], must be one of"),
    "negative": ({"a": GOOD | {"shape": [-2, -3]}}, r"a: is damaged: has shape \[-2, -3\]"),
    "float": ({"a": GOOD | {"shape": [2.0, 3]}}, r"a: is damaged: has shape \[2.0, 3\]"),
    "truth": ({"a": GOOD | {"shape": [True, 6]}}, r"a: is damaged: has shape \[True, 6\]"),
    "dimensions": ({"a": GOOD | {"shape": [1] * 99}}, r"a: is damaged: has shape \[1, 1"),
    "shape text": ({"a": GOOD | {"shape": "23"}}, "a: is damaged: has shape '23'"),
    "size": ({"a": GOOD | {"shape": [2, 4]}}, r"a: is damaged: has 24 bytes, .* needs 32"),
    "overflow": (
        {"a": GOOD | {"shape": [10**4000, 10**4000]}},
        "a: is damaged: has 24 bytes, .* needs a number beyond all bounds",
    ),
    "backwards": ({"a": GOOD | {"data_offsets": [24, 0]}}, r"a: is damaged: lies at \[24, 0\]"),
    "one offset": ({"a": GOOD | {"data_offsets": [24]}}, r"a: is damaged: lies at \[24\]"),
    "below": ({"a": GOOD | {"data_offsets": [-24, 0]}}, r"a: is damaged: lies at \[-24, 0\]"),
    "beyond": (
        {"a": GOOD | {"data_offsets": [2**70, 2**70 + 24]}},
        r"a: is truncated: ends at byte \d+ of a file of",
    ),
    "overlap": (
        {"a": GOOD, "b": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}},
        "b: is damaged: overlaps a",
    ),
    "same place": ({"a": GOOD, "b": GOOD}, "b: is damaged: overlaps a"),
    "gap": (
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}},
        "a: is damaged: 20 bytes before it belong to no tensor",
    ),
    "rest": (
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}},
        "is damaged: 20 bytes at its end belong to no tensor",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_header_is_told_with_file_tensor_and_reason(
    file: Path, write_raw: Write, name: str
) -> None:
    header, reason = FAULTS[name]
    write_raw(file, header, bytes(24))
    with pytest.raises(CheckpointError, match=rf"/model\.safetensors: {reason}"):
        read_header(file)


@pytest.mark.parametrize("size", [0, 1, MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_absurd_length_is_refused_before_it_is_read(
    file: Path, write_raw: Write, size: int
) -> None:
    write_raw(file, b"{}", size=size)
    with pytest.raises(CheckpointError, match=f"header of {size} bytes, must be 2 to"):
        read_header(file)


def test_a_header_longer_than_the_file_is_refused(file: Path, write_raw: Write) -> None:
    write_raw(file, b"{}", size=50_000_000)
    with pytest.raises(CheckpointError, match="header of 50000000 bytes in a file of 10"):
        read_header(file)


def make_missing(file: Path) -> None: ...


def make_folder(file: Path) -> None:
    file.mkdir()


def make_pipe(file: Path) -> None:
    os.mkfifo(file)


def make_loop(file: Path) -> None:
    file.symlink_to(file)


def make_dangling(file: Path) -> None:
    file.symlink_to(file.with_name("gone"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_missing, "is missing"),
        (make_folder, "is no regular file"),
        (make_pipe, "is no regular file"),
        (make_loop, "cannot be opened: Too many levels of symbolic links"),
        (make_dangling, "is missing"),
    ],
)
def test_what_is_no_file_is_told(file: Path, make: Callable[[Path], None], reason: str) -> None:
    make(file)
    with pytest.raises(CheckpointError, match=rf"/model\.safetensors: {reason}"):
        read_header(file)


def test_a_link_to_a_file_is_read(file: Path, write_raw: Write) -> None:
    write_raw(file.with_name("blob"), {"a": GOOD}, bytes(24))
    file.symlink_to(file.with_name("blob"))
    assert [entry.name for entry in read_header(file)] == ["a"]


TENSORS = {"first": torch.arange(6.0).reshape(2, 3), "second": torch.arange(5, dtype=torch.int8)}


def accepts(file: Path) -> bool:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return all(tensors.get_tensor(name) is not None for name in tensors.keys())  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, OverflowError, TypeError, RuntimeError):
        return False


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_damage_to_a_header_gives_another_error_or_passes_where_the_library_refuses(
    file: Path, data: st.DataObject
) -> None:
    """Any bytes changed, cut out or put in, within the header and its length."""
    save_file(TENSORS, file)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    first = data.draw(st.integers(0, header - 1))
    cut = data.draw(st.integers(0, 4))
    put = data.draw(st.binary(max_size=4) | st.sampled_from([b"}", b"[", b'"', b"0", b"9", b" "]))
    file.write_bytes(whole[:first] + put + whole[first + cut :])
    try:
        read_header(file)
    except CheckpointError as error:
        assert str(file) in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert accepts(file)
