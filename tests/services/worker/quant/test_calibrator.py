"""The float model, one layer at a time, is the float model."""

import gc
from pathlib import Path

import pytest
import torch

from services.worker.kv_cache import allocate
from services.worker.loading.load import load_model
from services.worker.loading.reader import CheckpointReader
from services.worker.model.layer import DecoderLayer
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.quant import calibrator as module
from services.worker.quant.calibrator import Calibrator, prefill_step
from services.worker.quant.input_range import Histogram
from services.worker.quant.observer import InputObserver
from services.worker.quant.recipe import RECIPES


def test_a_step_of_prompts_has_blocks_of_its_own_for_each() -> None:
    step, num_blocks = prefill_step([[1] * 130, [2] * 3])
    assert num_blocks == 4  # scratch, two, one
    assert step.block_table.tolist() == [[1, 2], [3, 0]]
    assert step.slot_mapping[[0, 127, 128, 130]].tolist() == [128, 255, 256, 384]
    assert step.positions[[129, 130, 132]].tolist() == [129, 0, 2]
    assert step.cum_query_lens.tolist() == [130, 133]
    assert step.seq_lens.tolist() == [130, 3]
    assert step.num_tokens == 133


@pytest.mark.parametrize("max_tokens", [4096, 160])
def test_the_last_layer_sees_what_it_sees_in_the_whole_model(
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    spec: ModelSpec,
    prompts: list[list[int]],
    max_tokens: int,
) -> None:
    monkeypatch.setattr(module, "MAX_STEP_TOKENS", max_tokens)
    with CheckpointReader(source) as reader:
        calibrator = Calibrator(reader, spec, RECIPES["w8a8"], prompts)
        layers = [calibrator.run(layer) for layer in range(4)]
    decoder = load_model(source, spec)
    product = decoder.layers[3].self_attn.o_proj
    histogram = Histogram()
    with InputObserver({product.weight.data_ptr(): histogram}, {}):
        for prompt in prompts:
            step, num_blocks = prefill_step([prompt])
            decoder.forward(torch.tensor(prompt), step, allocate(spec, num_blocks))
    assert layers[3].range_of("model.layers.3.self_attn.o_proj") == histogram.best_range()


def test_experts_are_weighed_by_the_rows_that_chose_them(
    source: Path, spec: ModelSpec, prompts: list[list[int]]
) -> None:
    with CheckpointReader(source) as reader:
        calibrator = Calibrator(reader, spec, RECIPES["w4a8c8"], prompts)
        dense, sparse = calibrator.run(0), calibrator.run(1)
    name = "model.layers.1.mlp.experts.3."
    up, down = (sparse.moments_of(f"{name}{kind}_proj") for kind in ("up", "down"))
    assert up is not None
    assert up.shape == (64,)
    assert down is not None
    assert down.shape == (32,)
    # A norm's output times weights near 1: mean squares near 1.
    assert 0.3 < float(up.mean()) < 3
    assert not dense._experts


def test_nothing_holds_a_layers_weights_as_read_when_they_are_packed(
    source: Path, spec: ModelSpec, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    finish = DecoderLayer.finish_loading

    def count() -> int:
        gc.collect()
        return sum(type(thing) is WeightSlot for thing in gc.get_objects())

    def look(layer: DecoderLayer) -> None:
        found.append(count())
        finish(layer)

    monkeypatch.setattr(DecoderLayer, "finish_loading", look)
    before = count()
    with CheckpointReader(source) as reader:
        calibrator = Calibrator(reader, spec, RECIPES["w8a8"], prompts)
        for layer in range(2):
            calibrator.run(layer)
    assert found == [before] * 2


def test_no_layer_stays_in_memory(source: Path, spec: ModelSpec, prompts: list[list[int]]) -> None:
    def count() -> int:
        gc.collect()
        return sum(type(thing) is DecoderLayer for thing in gc.get_objects())

    before = count()
    with CheckpointReader(source) as reader:
        calibrator = Calibrator(reader, spec, RECIPES["w8a8"], prompts)
        inputs = [calibrator.run(layer) for layer in (0, 1)]
        assert count() == before
    assert len(inputs) == 2
