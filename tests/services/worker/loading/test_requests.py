from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.worker.loading.header import read_header
from services.worker.loading.requests import PieceReader, file_request, tensor_request
from shared.errors import CheckpointError


def carry_out(path: Path, window: tuple[slice, ...] | None) -> np.ndarray:
    (entry,) = read_header(path)
    request = tensor_request(entry, window)
    data = np.empty(request.num_bytes, np.uint8)
    reader = PieceReader()
    for piece in request.pieces:
        reader.read(request, piece, data)
    reader.close()
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_request_is_the_bytes_of_its_window(path: Path) -> None:
    tensor = torch.arange(48, dtype=torch.int16).reshape(6, 8)
    save_file({"a": tensor}, path)
    for window in (None, (slice(1, 4), slice(0, 8)), (slice(2, 6), slice(3, 5))):
        expected = tensor if window is None else tensor[window]
        assert carry_out(path, window).tobytes() == expected.numpy().tobytes()


def test_values_are_looked_at_where_they_are_kept_and_only_there(path: Path) -> None:
    tensor = torch.zeros(6, 8, dtype=torch.bfloat16)
    tensor[2, 3] = float("nan")
    save_file({"a": tensor}, path)
    carry_out(path, (slice(0, 6), slice(4, 8)))
    with pytest.raises(CheckpointError, match=r"/model\.safetensors: a: holds NaN or infinity"):
        carry_out(path, (slice(0, 6), slice(3, 8)))


def test_a_whole_file_is_read_unseen(path: Path) -> None:
    save_file({"a": torch.full((3,), float("nan"))}, path)
    (entry,) = read_header(path)
    request = file_request(entry.file)
    data = np.empty(request.num_bytes, np.uint8)
    reader = PieceReader()
    for piece in request.pieces:
        reader.read(request, piece, data)
    reader.close()
    assert data.tobytes() == path.read_bytes()
