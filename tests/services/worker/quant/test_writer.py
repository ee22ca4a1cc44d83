"""A folder under the target's name is a whole checkpoint, or is not there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.worker.quant import writer as module
from services.worker.quant.scheme import DESCRIPTION_FILE, Scheme
from services.worker.quant.writer import INDEX_FILE, CheckpointWriter
from shared.errors import ConfigError


def fill(writer: CheckpointWriter) -> None:
    for number in range(4):
        writer.add(f"a.{number}.weight", torch.full((10, 10), float(number)), Scheme.FLOAT)
    writer.add("b.weight", torch.ones((4, 4), dtype=torch.int8), Scheme.W8A8_DYNAMIC)
    writer.add("b.weight_scale", torch.ones((4, 1)), Scheme.W8A8_DYNAMIC)


def make(target: Path, *, max_shard_bytes: int = 1000, is_overwrite: bool = False) -> None:
    with CheckpointWriter(
        target, max_shard_bytes=max_shard_bytes, is_overwrite=is_overwrite
    ) as writer:
        fill(writer)
        writer.commit({"model_type": "x"}, {"indexer_quant_type": "INT8_DYNAMIC"})


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_files_are_named_by_number_and_count(tmp_path: Path) -> None:
    make(tmp_path / "out")
    shards = [f"quant_model_weights-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert names(tmp_path / "out") == sorted(["config.json", DESCRIPTION_FILE, INDEX_FILE, *shards])
    sizes = [len(load_file(tmp_path / "out" / shard)) for shard in shards]
    assert sizes == [2, 4]  # two of 400 bytes fit into 1000, and two of 16


def test_the_index_tells_where_each_tensor_is_and_how_much_there_is(tmp_path: Path) -> None:
    make(tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 4 * 400 + 16 + 16}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert len(index["weight_map"]) == 6


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(tmp_path: Path) -> None:
    make(tmp_path / "out", max_shard_bytes=100)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 5


def test_the_description_has_an_entry_for_each_tensor(tmp_path: Path) -> None:
    make(tmp_path / "out")
    values = json.loads((tmp_path / "out" / DESCRIPTION_FILE).read_text())
    assert values == {
        "model_quant_type": "W8A8_DYNAMIC",
        "version": "1.0.0",
        "group_size": 0,
        "metadata": {},
        "optional": {},
        "indexer_quant_type": "INT8_DYNAMIC",
        **{f"a.{number}.weight": "FLOAT" for number in range(4)},
        "b.weight": "W8A8_DYNAMIC",
        "b.weight_scale": "W8A8_DYNAMIC",
    }


def test_everybody_may_read_it(tmp_path: Path) -> None:
    make(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    for file in (tmp_path / "out").iterdir():
        assert file.stat().st_mode & 0o044 == 0o044, file


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def interrupted() -> None:
        with CheckpointWriter(tmp_path / "out", max_shard_bytes=100) as writer:
            fill(writer)
            assert names(tmp_path) == [writer.folder.name]
            raise StopError

    with pytest.raises(StopError):
        interrupted()
    assert names(tmp_path) == []


def test_the_description_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    sync = module._sync

    def record(path: Path) -> None:
        written.append(path.name)
        sync(path)

    monkeypatch.setattr(module, "_sync", record)
    make(tmp_path / "out")
    assert written[-3:] == [INDEX_FILE, "config.json", DESCRIPTION_FILE]


def test_an_empty_directory_is_a_target(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert names(tmp_path) == ["out"]


def test_parents_are_made(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "out")
    assert names(tmp_path / "a" / "b") == ["out"]


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path: Path) -> None:
    make(tmp_path / "out")
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match=r"out: is not empty; --overwrite replaces"):
        make(tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()
    make(tmp_path / "out", is_overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()
    assert names(tmp_path) == ["out"]


def test_only_checkpoints_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    with pytest.raises(ConfigError, match=r"home: --overwrite replaces only checkpoints"):
        make(tmp_path / "home", is_overwrite=True)
    assert (tmp_path / "home" / "letter").exists()


def test_files_and_links_are_no_targets(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match=rf"{name}: exists and is no directory"):
            make(tmp_path / name, is_overwrite=True)


def test_a_target_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "out", max_shard_bytes=1000) as writer:
        fill(writer)
        make(tmp_path / "out")
        with pytest.raises(ConfigError, match="is not empty"):
            writer.commit({}, {})
    assert names(tmp_path) == ["out"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out: cannot be written"):
        make(tmp_path / "file" / "out")
