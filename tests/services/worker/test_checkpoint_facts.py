import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.worker.checkpoint_facts import model_digest, num_known_ids
from shared.errors import CheckpointError


def write(path: Path, **tensors: torch.Tensor) -> None:
    (path / "config.json").write_text("{}")
    save_file(tensors, str(path / "model.safetensors"))


def test_the_digest_follows_config_names_and_shapes(tmp_path: Path) -> None:
    write(tmp_path, a=torch.zeros(2))
    first = model_digest(tmp_path)
    assert len(first) == 64
    write(tmp_path, a=torch.ones(2))
    assert model_digest(tmp_path) == first
    write(tmp_path, b=torch.zeros(2))
    assert model_digest(tmp_path) != first
    write(tmp_path, a=torch.zeros(2))
    (tmp_path / "config.json").write_text('{"x": 1}')
    assert model_digest(tmp_path) != first


def test_a_missing_config_or_a_cut_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        model_digest(tmp_path)
    write(tmp_path, a=torch.zeros(2))
    (tmp_path / "model.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError):
        model_digest(tmp_path)


def test_a_pipe_beside_the_weights_does_not_hang(tmp_path: Path) -> None:
    write(tmp_path, a=torch.zeros(2))
    os.mkfifo(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"other\.safetensors: is no regular file"):
        model_digest(tmp_path)


def write_tokenizer(path: Path, vocab: dict[str, int]) -> None:
    values = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}}
    (path / "tokenizer.json").write_text(json.dumps(values))


def test_ids_are_known_up_to_the_largest_of_the_tokenizer(tmp_path: Path) -> None:
    assert num_known_ids(tmp_path, 100) == 100
    write_tokenizer(tmp_path, {"a": 0, "b": 7})
    assert num_known_ids(tmp_path, 100) == 8
    assert num_known_ids(tmp_path, 8) == 8


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"a": 0, "b": 7})
    with pytest.raises(CheckpointError, match="has 8 ids, the model has 7"):
        num_known_ids(tmp_path, 7)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        num_known_ids(tmp_path, 7)
