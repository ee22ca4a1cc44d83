"""What each rank reads, and what it holds while it does."""

import gc
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.synthetic_checkpoint import full_width_config, write_checkpoint
from services.worker.loading.files import FileCursor, WeightFile
from services.worker.loading.load import load_model
from services.worker.loading.reader import CheckpointReader
from services.worker.loading.strategy import LoadStrategy, ReadMode
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.placement import Placement
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec

MODES = [ReadMode.LAZY, ReadMode.PREFETCH, ReadMode.EAGER]
RANKS = [
    Placement(tp_size=2, tp_rank=0),
    Placement(tp_size=4, tp_rank=3),
    Placement(tp_size=2, tp_rank=1, ep_size=4, ep_rank=2),
    Placement(first_layer=1, last_layer=3),
    Placement(first_layer=3),
]


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint()


@pytest.fixture
def spec(source: Any) -> ModelSpec:
    config = ModelConfig.from_dict(source.values)
    return ModelSpec(config=config, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", RANKS)
def test_every_slot_gets_its_window_in_every_mode(
    source: Any,
    spec: ModelSpec,
    placement: Placement,
    mode: ReadMode,
    given: dict[str, Tensor],
) -> None:
    whole = load_file(source.path / "model.safetensors")
    placed = replace(spec, placement=placement)
    load_model(source.path, placed, LoadStrategy(mode=mode, num_threads=3, memory_bytes=1 << 16))
    slots = {slot.name: slot for slot in Decoder.build(placed).slots()}
    assert given.keys() == slots.keys()
    for name, slot in slots.items():
        expected = whole[name] if slot.window is None else whole[name][slot.window]
        assert torch.equal(given[name], expected), name


class Touched:
    """Bytes of the file that were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        read = FileCursor.read

        def spy(cursor: FileCursor, file: WeightFile, offset: int, target: Any, name: str) -> None:
            self.spans.append((offset, offset + target.nbytes))
            read(cursor, file, offset, target, name)

        monkeypatch.setattr(FileCursor, "read", spy)

    def total(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def touches(self, start: int, stop: int) -> bool:
        return any(first < stop and start < last for first, last in self.spans)


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH])
@pytest.mark.parametrize("ep_rank", range(4))
def test_no_byte_of_another_ranks_experts_is_read(
    source: Any, spec: ModelSpec, ep_rank: int, mode: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = Touched(monkeypatch)
    placement = Placement(tp_size=2, tp_rank=ep_rank % 2, ep_size=4, ep_rank=ep_rank)
    load_model(source.path, replace(spec, placement=placement), LoadStrategy(mode=mode))
    own = {f".experts.{expert}." for expert in placement.experts(8)}
    with CheckpointReader(source.path) as reader:
        experts = {n: e for n, e in reader.entries().items() if ".experts." in n}
    assert experts
    for name, entry in experts.items():
        is_own = any(mark in name for mark in own)
        assert touched.touches(entry.offset, entry.offset + entry.num_bytes) == is_own, name


@pytest.mark.parametrize("placement", RANKS)
def test_a_rank_reads_its_share_and_gaps_between_columns(
    source: Any, spec: ModelSpec, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = Touched(monkeypatch)
    placed = replace(spec, placement=placement)
    load_model(source.path, placed, LoadStrategy(mode=ReadMode.PREFETCH))
    share = gaps = 0
    for slot in Decoder.build(placed).slots():
        kept = math.prod(slot.kept_shape) * 4
        share += kept
        if slot.window is not None and slot.kept_shape[1:] != slot.shape[1:]:
            rows = slot.kept_shape[0]
            gaps += rows * math.prod(slot.shape[1:]) * 4 - kept
    assert share <= touched.total() <= share + gaps


def num_slots() -> int:
    """How many are alive, each with the weight that it fills."""
    gc.collect()
    return sum(type(item) is WeightSlot for item in gc.get_objects())


_LOAD = """
import json, sys
from pathlib import Path
from benchmarks.loading import load_once
print(json.dumps(load_once(Path(sys.argv[1]), sys.argv[2], memory_bytes=int(sys.argv[3]))))
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """300 MiB in four files, and their largest tensor."""
    folder = tmp_path_factory.mktemp("synthetic")
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 1024, "q_lora_rank": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "index_n_heads": 8}
    values = full_width_config(16, **sizes, **heads)
    num_bytes = write_checkpoint(folder, values, num_files=4)
    assert num_bytes > 250 * MIB
    yield folder, 16 * 256 * 2048 * 2
    for file in folder.iterdir():
        file.unlink()


@pytest.mark.parametrize("mode", [ReadMode.LAZY, ReadMode.PREFETCH])
def test_beside_the_weights_there_is_little_more_than_the_budget(
    synthetic: tuple[Path, int], mode: ReadMode
) -> None:
    folder, largest = synthetic
    budget = 48 * MIB
    command = [sys.executable, "-c", _LOAD, str(folder), mode.value, str(budget)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    # A block of scratch per thread. At the end a layer's experts twice, in two orders.
    allowed = max(budget + largest + 2 * 16 * MIB, 16 * 2 * 1024 * 2048 * 2)
    # 40 MiB for modules of the model, imported while it loads.
    allowed += 40 * MIB
    assert json.loads(out.stdout)["mib_beside_weights"] * MIB < allowed


def test_nothing_holds_the_weights_as_read_when_they_are_packed(
    source: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every weight would be there twice at the end."""
    found: list[int] = []
    finish = Decoder.finish_loading

    def look(decoder: Decoder) -> None:
        found.append(num_slots())
        finish(decoder)

    monkeypatch.setattr(Decoder, "finish_loading", look)
    before = num_slots()
    load_model(source.path, spec)
    assert found == [before]


def test_a_rank_of_a_large_model_reads_about_a_sixteenth(
    synthetic: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = synthetic
    touched = Touched(monkeypatch)
    placement = Placement(tp_size=4, tp_rank=1, ep_size=16, ep_rank=5)
    config = ModelConfig.from_dir(folder)
    device = torch.device("cpu")
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=device, placement=placement)
    slots = list(Decoder.build(spec).slots())
    load_model(folder, spec, LoadStrategy(mode=ReadMode.PREFETCH))
    share = sum(math.prod(slot.kept_shape) for slot in slots) * 2
    cut_by_columns = sum(
        math.prod(slot.shape) * 2 for slot in slots if slot.kept_shape[1:] != slot.shape[1:]
    )
    assert touched.total() <= share + cut_by_columns
    whole = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # One expert of sixteen, a quarter of most of the rest, all of what is cut by columns.
    assert touched.total() < 0.3 * whole
