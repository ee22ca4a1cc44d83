"""The pieces of a window are its bytes, each once, in blocks of bounded size."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.loading import window as windows
from services.worker.loading.files import FileCursor, open_regular
from services.worker.loading.window import (
    BLOCK_BYTES,
    Piece,
    check_window,
    pieces,
    read_piece,
    window_shape,
)

Window = tuple[slice, ...]
BASE = 7  # the tensor need not begin at an even place


@st.composite
def shapes_and_windows(draw: st.DrawFn) -> tuple[tuple[int, ...], Window]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    ends = [sorted(draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    return shape, tuple(slice(start, stop) for start, stop in ends)


def fetch(
    path: Path, array: np.ndarray, window: Window, block_bytes: int
) -> tuple[np.ndarray, list[Piece], int]:
    """What the pieces bring, the pieces, and the bytes read for them."""
    path.write_bytes(bytes(BASE) + array.tobytes())
    descriptor, file = open_regular(path)
    os.close(descriptor)
    cut = list(pieces(array.shape, window, array.itemsize, block_bytes))
    target = np.zeros(sum(piece.num_bytes for piece in cut), np.uint8)
    scratch = np.empty(block_bytes, np.uint8)
    with FileCursor() as cursor:
        for piece in cut:
            read_piece(cursor, file, BASE, piece, target, scratch)
        return target, cut, cursor.num_bytes_read


@pytest.mark.parametrize("max_gap", [0, 8, 1 << 16])
@settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    shape_and_window=shapes_and_windows(),
    item=st.sampled_from([np.uint8, np.uint16, np.float32, np.float64]),
    block=st.sampled_from([8, 16, 64, 1024]),
)
def test_any_window_of_any_tensor_arrives(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape_and_window: tuple[tuple[int, ...], Window],
    item: type,
    block: int,
    max_gap: int,
) -> None:
    monkeypatch.setattr(windows, "_MAX_GAP_BYTES", max_gap)
    shape, window = shape_and_window
    array = np.arange(np.prod(shape, dtype=int)).astype(item).reshape(shape)
    target, cut, _ = fetch(tmp_path / "file", array, window, block)
    assert target.tobytes() == array[window].tobytes()
    assert window_shape(window) == array[window].shape
    assert [piece.offset for piece in cut] == sorted(piece.offset for piece in cut)
    for piece in cut:
        assert (piece.count - 1) * piece.stride + piece.run <= block
        # A piece is looked at as whole elements.
        assert piece.target % array.itemsize == 0
        assert piece.num_bytes % array.itemsize == 0


def test_whole_rows_are_one_run_and_nothing_beside_them_is_read(tmp_path: Path) -> None:
    array = np.arange(100 * 64, dtype=np.uint16).reshape(100, 64)
    _, cut, num_read = fetch(tmp_path / "file", array, (slice(30, 60), slice(0, 64)), BLOCK_BYTES)
    assert len(cut) == 1
    assert num_read == 30 * 64 * 2


def test_columns_with_narrow_gaps_are_read_as_spans(tmp_path: Path) -> None:
    array = np.arange(100 * 64, dtype=np.uint16).reshape(100, 64)
    window = (slice(0, 100), slice(16, 32))
    target, cut, num_read = fetch(tmp_path / "file", array, window, 1 << 12)
    assert target.tobytes() == array[window].tobytes()
    assert len(cut) == 4  # 32 rows of 128 bytes fit in a block
    # All rows, but not what lies before the first run of a block or behind its last.
    assert num_read == 100 * 128 - len(cut) * 96


def test_columns_with_wide_gaps_are_read_alone(tmp_path: Path) -> None:
    array = np.zeros((4, 200_000), np.uint8)
    array[:, 150_000:] = np.arange(4 * 50_000).reshape(4, -1)
    window = (slice(1, 4), slice(150_000, 200_000))
    target, cut, num_read = fetch(tmp_path / "file", array, window, BLOCK_BYTES)
    assert target.tobytes() == array[window].tobytes()
    assert len(cut) == 3
    assert num_read == 3 * 50_000


def test_a_long_run_is_cut_into_blocks() -> None:
    rows = 5 * BLOCK_BYTES // 1024 // 2
    cut = list(pieces((rows, 512), check_window((rows, 512), None), 2))
    assert [piece.run for piece in cut] == [BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES // 2]
    assert all(a.target + a.run == b.target for a, b in itertools.pairwise(cut))


@pytest.mark.parametrize(
    "window",
    [
        (slice(0, 3),),
        (slice(0, 3), slice(0, 5)),
        (slice(2, 1), slice(0, 4)),
        (slice(-1, 3), slice(0, 4)),
        (slice(0, 3, 2), slice(0, 4)),
    ],
)
def test_a_window_that_does_not_fit_is_our_fault(window: Window) -> None:
    with pytest.raises(AssertionError):
        check_window((3, 4), window)


def test_no_window_is_everything() -> None:
    assert check_window((3, 4), None) == (slice(0, 3), slice(0, 4))
