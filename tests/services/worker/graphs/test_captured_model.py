"""Decode steps of chosen sizes, padded and with dead rows, against operators called one by one."""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.graphs.captured_model import CapturedModel
from services.worker.kv_cache import KVCaches, LayerCache
from services.worker.model_build import build_model_executor
from services.worker.model_executor import ModelExecutor
from services.worker.settings import WorkerSettings
from tests.services.worker.plans import MiniScheduler

SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 5, "top_p": 0.8},
    {"temperature": 0.0, "num_logprobs": 3},
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The builder sets torch's threads for its process: put them back for the other tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(make_checkpoint: Callable[..., Any]) -> Path:
    found: Path = make_checkpoint(num_nextn_predict_layers=1).path
    return found


def build(path: Path, **changes: Any) -> ModelExecutor[KVCaches]:
    values = {
        "max_num_seqs": 5,
        "max_num_batched_tokens": 64,
        "max_model_len": 200,
        "num_kv_blocks": 16,
        "num_threads": 1,
    }
    settings = WorkerSettings(address="unix:/tmp/w.sock", model=path, **(values | changes))
    executor = build_model_executor(settings, path)
    assert isinstance(executor, ModelExecutor)
    return executor


def run(executor: ModelExecutor[KVCaches]) -> list[list[int]]:
    """Up to five sequences, of which some end, and end at the end of the context."""
    scheduler, chance = MiniScheduler(executor, chunk=11), random.Random(3)
    lives = []
    for index, length in enumerate((1, 20, 140, 193, 33)):
        prompt = [chance.randrange(3, 97) for _ in range(length)]
        sampling = SAMPLINGS[index % len(SAMPLINGS)]
        lives.append(scheduler.add(prompt, max_tokens=5 + 4 * index, **sampling))
    scheduler.run()
    assert [one.error for one in lives] == [None] * len(lives)
    return [one.outputs for one in lives]


def caches_of(executor: ModelExecutor[KVCaches]) -> list[torch.Tensor]:
    """Every cache but for the scratch block, which padding writes."""
    return [
        cache[1:]
        for layer in executor._caches.layers
        for field in fields(LayerCache)
        if (cache := getattr(layer, field.name)) is not None
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_drafts", "sizes", "used"), [(0, (2, 5), [2, 5]), (2, (3, 12, 15), [3, 12, 15])]
)
def test_padding_and_dead_rows_change_nothing(
    path: Path, dtype: str, num_drafts: int, sizes: tuple[int, ...], used: list[int]
) -> None:
    flags = {"dtype": dtype, "num_speculative_tokens": num_drafts}
    captured = build(path, cudagraph_capture_sizes=sizes, **flags)
    model = captured._decoder
    assert isinstance(model, CapturedModel)
    assert model.sizes == used
    eager = build(path, enforce_eager=True, **flags)
    assert run(captured) == run(eager)
    for one, other in zip(caches_of(captured), caches_of(eager), strict=True):
        assert torch.equal(one, other)


def test_the_default_sizes_are_captured_up_to_a_bound(path: Path) -> None:
    model = build(path, max_cudagraph_capture_size=4)._decoder
    assert isinstance(model, CapturedModel)
    assert model.sizes == [1, 2, 4]


def test_decode_steps_are_done_from_captured_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = build(path, cudagraph_capture_sizes=(5,))
    model = executor._decoder
    assert isinstance(model, CapturedModel)
    called: list[int] = []
    forward = model._model.forward

    def counted(token_ids: Any, step: Any, caches: Any) -> Any:
        called.append(len(token_ids))
        return forward(token_ids, step, caches)

    monkeypatch.setattr(model._model, "forward", counted)
    scheduler = MiniScheduler(executor)
    for _ in range(3):
        scheduler.add([5, 6, 7], max_tokens=10)
    scheduler.run()
    assert called == [9]


def test_a_model_that_cannot_be_captured_runs_and_tells_why_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from services.worker.model.decoder import Decoder

    forward = Decoder.forward
    monkeypatch.setattr(
        Decoder, "forward", lambda *arguments: forward(*arguments).exp().log_().exp_().log_()
    )
    with caplog.at_level(logging.WARNING):
        executor = build(path, cudagraph_capture_sizes=(1, 2, 5))
    told = [record for record in caplog.records if "steps are not captured" in record.message]
    assert len(told) == 1
    assert "aten::exp" in told[0].getMessage()
    model = executor._decoder
    assert isinstance(model, CapturedModel)
    assert model.sizes == []
    assert run(executor)
