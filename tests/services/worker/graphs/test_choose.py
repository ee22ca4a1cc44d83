import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.dummy import dummy_step
from services.worker.graphs import choose
from services.worker.graphs.captured_model import CapturedModel
from services.worker.graphs.choose import Capture, capture_steps
from services.worker.graphs.recorded_model import RecordedModel
from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.model_build import build_model_executor
from services.worker.model_executor import ModelExecutor
from services.worker.ops.native import Native
from services.worker.parallel.moe_method import MoeMethod
from services.worker.settings import WorkerSettings
from tests.services.worker.plans import make_capacity

LIMITS = make_capacity(num_blocks=4, block_size=128, max_model_len=256)


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


def settings(path: Path, **changes: Any) -> WorkerSettings:
    values = {"num_kv_blocks": 8, "max_model_len": 256, "max_num_seqs": 2, "num_threads": 1}
    return WorkerSettings(address="unix:/tmp/w.sock", model=path, **(values | changes))


def load(path: Path, *, has_mtp: bool) -> Decoder:
    config = ModelConfig.from_dir(path)
    cpu = torch.device("cpu")
    spec = ModelSpec(config=config, dtype=torch.float32, device=cpu, has_mtp=has_mtp)
    return load_model(path, spec)


@pytest.mark.parametrize("has_mtp", [False, True])
def test_steps_are_recorded_with_and_without_drafts(
    library: Native, path: Path, has_mtp: bool
) -> None:
    decoder = load(path, has_mtp=has_mtp)
    caches = kv_cache.allocate(decoder.spec, 4)
    model = capture_steps(settings(path), decoder, caches, LIMITS, row_multiple=1).model
    assert isinstance(model, RecordedModel)
    token_ids, step = dummy_step(2, 3, torch.device("cpu"))
    expected = decoder.compute_logits(decoder.forward(token_ids, step, caches))
    assert torch.equal(model.compute_logits(model.forward(token_ids, step, caches)), expected)


def test_without_compiled_kernels_nothing_is_captured(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    decoder = load(path, has_mtp=False)
    monkeypatch.setattr(choose.native, "load", lambda: None)
    caches = kv_cache.allocate(decoder.spec, 4)
    assert capture_steps(settings(path), decoder, caches, LIMITS, row_multiple=1).model is decoder


def test_a_model_that_cannot_be_captured_runs_and_tells_why(
    library: Native,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: Path,
) -> None:
    decoder = load(path, has_mtp=False)
    caches = kv_cache.allocate(decoder.spec, 4)
    head = decoder.compute_logits
    monkeypatch.setattr(decoder, "compute_logits", lambda hidden: head(hidden).exp())
    with caplog.at_level(logging.WARNING):
        assert (
            capture_steps(settings(path), decoder, caches, LIMITS, row_multiple=1).model is decoder
        )
    assert "steps are not captured" in caplog.text
    assert "aten::exp" in caplog.text


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, RecordedModel),
        ({"enforce_eager": True}, Decoder),
        ({"cudagraph_mode": "NONE"}, Decoder),
        ({"cudagraph_capture_sizes": (1,)}, CapturedModel),
        ({"max_cudagraph_capture_size": 1}, CapturedModel),
    ],
)
def test_flags_of_the_worker_decide(
    library: Native, path: Path, flags: dict[str, Any], kind: type
) -> None:
    executor = build_model_executor(settings(path, **flags), path)
    assert isinstance(executor, ModelExecutor)
    assert isinstance(executor._decoder, kind)


def test_a_device_captures_by_itself_at_the_sizes_of_vllm(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(path, has_mtp=False)
    caches = kv_cache.allocate(decoder.spec, 4)
    monkeypatch.setattr(decoder, "device", SimpleNamespace(type="npu"))
    monkeypatch.setattr(choose, "DeviceCapturer", lambda: "of the device")
    capture = capture_steps(settings(path), decoder, caches, LIMITS, row_multiple=1)
    assert isinstance(capture.model, CapturedModel)
    assert capture.model._capturer == "of the device"
    assert capture.sizes is not None
    assert capture.sizes.sizes == (1, 2, 4)


@pytest.mark.parametrize(
    ("device", "kept"),
    # By all-gather up to 2 tokens, by a fused operator up to 3, by all-to-all above.
    [("cpu", (1, 2)), ("npu", (1, 2, 3))],
)
def test_steps_are_captured_where_ranks_exchange_without_asking_the_host(
    path: Path, monkeypatch: pytest.MonkeyPatch, device: str, kept: tuple[int, ...]
) -> None:
    decoder = load(path, has_mtp=False)
    caches = kv_cache.allocate(decoder.spec, 4)
    monkeypatch.setattr(decoder, "device", SimpleNamespace(type=device))
    monkeypatch.setattr(choose, "DeviceCapturer", lambda: "of the device")

    def method_of(num_tokens: int) -> MoeMethod:
        methods = (MoeMethod.ALLGATHER, MoeMethod.ALLGATHER, MoeMethod.MC2, MoeMethod.ALLTOALL)
        return methods[num_tokens - 1]

    flags = {"cudagraph_capture_sizes": (1, 2, 3, 4)}
    capture = capture_steps(
        settings(path, **flags), decoder, caches, LIMITS, row_multiple=1, method_of=method_of
    )
    assert capture.sizes is not None
    assert capture.sizes.sizes == kept
    nothing = capture_steps(
        settings(path, **flags),
        decoder,
        caches,
        LIMITS,
        row_multiple=1,
        method_of=lambda num_tokens: MoeMethod.ALLTOALL,
    )
    assert nothing == Capture(model=decoder)
