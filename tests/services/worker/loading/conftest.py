"""Writes safetensors files by hand, so that a test can break any part of them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from services.worker.loading import load as load_module


@pytest.fixture
def write_raw() -> Callable[..., Path]:
    """Write a file from its parts: the header as a value or as bytes, and the tensors' bytes."""

    def write(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
        return path

    return write


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """What every slot is given from now on, by name."""
    taken: dict[str, Tensor] = {}
    store = load_module._store

    def spy(entry: Any, slot: Any, tensor: Tensor) -> None:
        taken[entry.name] = tensor.clone()
        store(entry, slot, tensor)

    monkeypatch.setattr(load_module, "_store", spy)
    return taken
