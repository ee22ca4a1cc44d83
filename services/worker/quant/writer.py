"""Writes a checkpoint in ModelSlim's layout, so that a folder under its name is always whole.

Everything goes into a hidden folder beside the target, the description last; then that folder takes
the target's name. What is interrupted leaves nothing, or a hidden folder without a description.
"""

import json
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from safetensors.torch import save_file
from torch import Tensor

from services.worker.quant.description import VERSION
from services.worker.quant.scheme import DESCRIPTION_FILE, Scheme
from shared.errors import ConfigError

_STEM: Final = "quant_model_weights"
INDEX_FILE: Final = f"{_STEM}.safetensors.index.json"
# What marks a folder as a checkpoint, which `--overwrite` may take away.
_MARKS: Final = ("config.json", DESCRIPTION_FILE)


class CheckpointWriter:
    """Takes tensors one by one and keeps at most one file of them in memory."""

    def __init__(self, target: Path, *, max_shard_bytes: int, is_overwrite: bool = False) -> None:
        """Check the target.

        Raises:
            ConfigError: The target exists and may not be replaced.
        """
        self._target = target
        self._is_overwrite = is_overwrite
        self._max_shard_bytes = max_shard_bytes
        check_target(target, is_overwrite=is_overwrite)
        # Named before it is made, so that nothing can come between that is not taken away.
        self.folder = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._shards: list[list[str]] = []
        self._types: dict[str, str] = {}
        self.num_bytes = 0
        """Bytes of tensors taken so far."""

    def __enter__(self) -> Self:
        """Make the folder beside the target.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"{self._target}: cannot be written: {error.strerror}") from error
        except BaseException:  # a signal: `with` has not begun, so nobody else takes it away
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # gone already after `commit`

    def add(self, name: str, tensor: Tensor, kind: Scheme) -> None:
        """Take a tensor; it is the writer's from here on."""
        assert name not in self._types
        size = tensor.nbytes
        if self._shard and self._shard_bytes + size > self._max_shard_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._shard_bytes += size
        self.num_bytes += size
        self._types[name] = kind.value

    def commit(self, config: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
        """Write what is left, and give the checkpoint its name.

        Args:
            config: The model's config.json.
            entries: Keys of the description beside one for each tensor.
        """
        self._flush()
        weight_map = self._name_shards()
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        self._write_json(INDEX_FILE, index)
        self._write_json("config.json", config)
        self._write_json(DESCRIPTION_FILE, self._describe(entries))
        self.folder.chmod(0o755)  # for the owner alone until now
        self._replace_target()

    def _flush(self) -> None:
        if not self._shard:
            return
        path = self.folder / _part_name(len(self._shards))
        save_file(self._shard, path, metadata={"format": "pt"})
        path.chmod(0o644)
        _sync(path)
        self._shards.append(list(self._shard))
        self._shard, self._shard_bytes = {}, 0

    def _name_shards(self) -> dict[str, str]:
        """Give the files names that say how many there are; tensor name -> file name."""
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            name = f"{_STEM}-{number + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.folder / _part_name(number)).rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        return weight_map

    def _describe(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        matrices = (kind for name, kind in self._types.items() if name.endswith(".weight"))
        # ModelSlim never names int4 here.
        unnamed = {Scheme.FLOAT.value, Scheme.W4A8_DYNAMIC.value}
        counts = Counter(kind for kind in matrices if kind not in unnamed)
        return {
            "model_quant_type": max(counts, key=counts.__getitem__, default=Scheme.FLOAT.value),
            "version": VERSION,
            "group_size": 0,
            "metadata": {},
            "optional": {},
            **entries,
            **self._types,
        }

    def _write_json(self, name: str, values: Mapping[str, Any]) -> None:
        path = self.folder / name
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        _sync(path)

    def _replace_target(self) -> None:
        check_target(self._target, is_overwrite=self._is_overwrite)
        if not self._target.exists():
            self.folder.rename(self._target)
            return
        # Its new name puts it out of the way, so that no moment shows a mixture of the two.
        old = Path(tempfile.mkdtemp(prefix=f".{self._target.name}.old-", dir=self._target.parent))
        self._target.rename(old / "old")
        self.folder.rename(self._target)
        shutil.rmtree(old)


def check_target(target: Path, *, is_overwrite: bool) -> None:
    """Refuse a target that holds something, unless it is a checkpoint that may be replaced.

    Raises:
        ConfigError: It may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise ConfigError(f"{target}: exists and is no directory")
    if not any(target.iterdir()):
        return
    if not is_overwrite:
        raise ConfigError(f"{target}: is not empty; --overwrite replaces a checkpoint there")
    if not any((target / mark).exists() for mark in _MARKS):
        raise ConfigError(
            f"{target}: --overwrite replaces only checkpoints, and this has no {_MARKS[0]}"
        )


def _part_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def _sync(path: Path) -> None:
    """Have it on the disk before a name says that it is there."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
