"""Which files of a directory are its weights, and whether they agree with their index."""

import itertools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.worker.loading.layout import fail_with, read_entries
from shared.errors import CheckpointError

PLAIN, QUANTIZED = "model.safetensors", "quant_model_weights.safetensors"
DESCRIPTION = "quant_model_description.json"


def write(path: Path, **names: str) -> Path:
    """A file with one-byte tensors; the keyword is the name."""
    save_file({name: torch.tensor([1], dtype=torch.uint8) for name in names}, path)
    return path


def write_index(path: Path, weight_map: object, name: str = PLAIN) -> Path:
    file = path / f"{name}.index.json"
    file.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return file


def found(path: Path) -> dict[str, str]:
    return {name: entry.file.path.name for name, entry in read_entries(path).items()}


@pytest.mark.parametrize("name", [PLAIN, QUANTIZED])
def test_one_file_is_found(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, a="")
    assert found(tmp_path) == {"a": name}


@pytest.mark.parametrize("name", [PLAIN, QUANTIZED])
def test_an_index_is_followed_in_natural_order(tmp_path: Path, name: str) -> None:
    files = [f"part-{number}.safetensors" for number in (1, 2, 10)]
    for letter, file in zip("zyx", files, strict=True):
        write(tmp_path / file, **{letter: ""})
    write_index(tmp_path, dict(zip("xyz", files[::-1], strict=True)), name)
    assert list(found(tmp_path).items()) == list(zip("zyx", files, strict=True))


def test_an_empty_directory_is_told_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_entries(tmp_path)
    for name in (PLAIN, f"{PLAIN}.index.json", QUANTIZED, f"{QUANTIZED}.index.json"):
        assert name in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_description_decides_between_two_families(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / PLAIN, a="")
    write(tmp_path / QUANTIZED, b="")
    with pytest.raises(CheckpointError, match=f"has both {PLAIN} and {QUANTIZED}"):
        read_entries(tmp_path)
    (tmp_path / DESCRIPTION).write_text("{}")
    with caplog.at_level(logging.INFO):
        assert found(tmp_path) == {"b": QUANTIZED}
    assert caplog.messages == ["left the float weights beside the quantized ones unread"]


def test_a_copied_index_without_its_files_does_not_matter_to_quantized_weights(
    tmp_path: Path,
) -> None:
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    write(tmp_path / QUANTIZED, b="")
    (tmp_path / DESCRIPTION).write_text("{}")
    assert found(tmp_path) == {"b": QUANTIZED}


def test_a_whole_file_that_its_index_does_not_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path / PLAIN, a="")
    write(tmp_path / "part.safetensors", a="")
    write_index(tmp_path, {"a": "part.safetensors"})
    with pytest.raises(CheckpointError, match=f"/{PLAIN}: is not in the index beside it"):
        read_entries(tmp_path)
    (tmp_path / "part.safetensors").unlink()
    write_index(tmp_path, {"a": PLAIN})
    assert found(tmp_path) == {"a": PLAIN}


def test_optional_files_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "part.safetensors", a="")
    write(tmp_path / "rot.safetensors", **{"rot.weight": ""})
    write_index(
        tmp_path,
        {
            "a": "part.safetensors",
            "rot.weight": "rot.safetensors",
            "global_rotation": "optional/quarot.safetensors",  # the file is not even there
        },
    )
    assert found(tmp_path) == {"a": "part.safetensors", "rot.weight": "rot.safetensors"}


def test_the_rotation_beside_a_single_file_is_found(tmp_path: Path) -> None:
    write(tmp_path / QUANTIZED, a="")
    write(tmp_path / "rot.safetensors", **{"rot.weight": ""})
    assert found(tmp_path) == {"a": QUANTIZED, "rot.weight": "rot.safetensors"}


def test_a_tensor_in_two_files_is_told_with_both(tmp_path: Path) -> None:
    write(tmp_path / "p1", a="", b="")
    write(tmp_path / "p2", a="", c="")
    write_index(tmp_path, {"a": "p1", "b": "p1", "c": "p2"})
    with pytest.raises(CheckpointError, match="/p2: a: is also in p1"):
        read_entries(tmp_path)


def test_every_difference_between_index_and_files_is_listed(tmp_path: Path) -> None:
    write(tmp_path / "p1", a="", b="", stray="")
    write(tmp_path / "p2", c="")
    write_index(tmp_path, {"a": "p1", "b": "p2", "c": "p2", "gone": "p1"})
    with pytest.raises(CheckpointError) as caught:
        read_entries(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/p2: b: is in {PLAIN}.index.json, not in the file",
        f"{tmp_path}/p1: gone: is in {PLAIN}.index.json, not in the file",
        f"{tmp_path}/p1: stray: is in the file, not in {PLAIN}.index.json",
    ]


def test_a_file_of_the_index_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "part.safetensors"})
    with pytest.raises(CheckpointError, match=r"/part\.safetensors: is missing"):
        read_entries(tmp_path)
    (tmp_path / "part.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"/part\.safetensors: is empty"):
        read_entries(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "is damaged: Expecting value"),
        (b"\xff", "is damaged: .* can't decode"),
        (b"[]", "is damaged: is no JSON object"),
        (b"[" * 100_000, "is damaged: is nested too deeply"),
        (b"{}", "must have a weight_map"),
        (b'{"weight_map": []}', "must have a weight_map"),
        (b'{"weight_map": {}}', "must have a weight_map"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "is damaged: names 'a' twice"),
    ],
)
def test_a_broken_index_is_told(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / f"{PLAIN}.index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"/{PLAIN}\.index\.json: {reason}"):
        read_entries(tmp_path)


PLACES_ELSEWHERE = (
    [None, 3, "", ".", "..", "../x", "/etc/passwd", "a/../x", "sub/x", "x/", "./x", "a\0b", "a\nb"],
    ["optional/../x", "optional/a/b", ["x"]],
)


@pytest.mark.parametrize("target", list(itertools.chain(*PLACES_ELSEWHERE)))
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, target: object) -> None:
    write_index(tmp_path, {"a": target})
    with pytest.raises(CheckpointError, match=r"'a': weight_map names .* must be a file beside"):
        read_entries(tmp_path)


def test_links_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    (tmp_path / PLAIN).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=f"/{PLAIN}: is missing$"):
        read_entries(tmp_path)
    (tmp_path / PLAIN).unlink()
    index = tmp_path / f"{PLAIN}.index.json"
    index.symlink_to(index)
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be opened: Too many levels"):
        read_entries(tmp_path)


def test_a_pipe_in_the_place_of_an_index_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{PLAIN}.index.json")
    with pytest.raises(CheckpointError, match=r"index\.json: is no regular file"):
        read_entries(tmp_path)


def test_very_many_faults_are_cut_short() -> None:
    with pytest.raises(CheckpointError) as caught:
        fail_with([f"fault {number}" for number in range(73)])
    lines = str(caught.value).splitlines()
    assert len(lines) == 51
    assert lines[-1] == "and 23 more"
    fail_with([])


def test_entries_know_type_shape_and_place(tmp_path: Path) -> None:
    tensors: Mapping[str, Any] = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.int8)}
    save_file(dict(tensors), tmp_path / PLAIN)
    entries = read_entries(tmp_path)
    assert {name: (one.type_name, one.shape) for name, one in entries.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("I8", (5,)),
    }
