"""The largest step on a CPU in the place of a device: which tensors it makes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker import largest_step
from services.worker.largest_step import run_largest_step
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.ops import native
from services.worker.settings import WorkerSettings

VOCAB = 97


class Made(TorchDispatchMode):
    """Names of operators and the shapes of what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.shapes.add((func._schema.name, tuple(one.shape)))
        return out


@pytest.fixture
def as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have no compiled draw."""
    monkeypatch.setattr(native, "load", lambda: None)


def settings(path: Path, **changes: Any) -> WorkerSettings:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "num_threads": 1}
    return WorkerSettings(address="unix:/tmp/w.sock", model=path, **(values | changes))


def decoder_of(path: Path, *, has_mtp: bool = False) -> Decoder:
    spec = ModelSpec(
        config=ModelConfig.from_dir(path), dtype=torch.float32, device=torch.device("cpu")
    )
    decoder = Decoder.build(replace(spec, has_mtp=has_mtp))
    for slot in decoder.slots():
        # Zeros in every weight: the numbers do not matter, the shapes do.
        shape = slot.shape
        if slot.window is not None:
            shape = tuple(
                len(range(*w.indices(n))) for w, n in zip(slot.window, shape, strict=True)
            )
        slot.store(torch.zeros(shape))
    decoder.finish_loading()
    return decoder


@pytest.fixture(scope="module")
def path(make_checkpoint: Callable[..., Any]) -> Path:
    made: Path = make_checkpoint(seed=6, num_nextn_predict_layers=1).path
    return made


@pytest.mark.usefixtures("as_a_device")
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_all_rows_are_drawn_filtered_penalised_and_measured(path: Path, num_drafts: int) -> None:
    """Otherwise the first such step finds no memory, after the blocks were counted."""
    made = Made()
    asked = settings(path, num_speculative_tokens=num_drafts)
    with made:
        run_largest_step(asked, decoder_of(path, has_mtp=num_drafts > 0), 512)
    rows = 4 * (1 + num_drafts)
    for name in ("aten::sort", "aten::softmax", "aten::cumsum", "aten::log_softmax"):
        assert (name, (rows, VOCAB)) in made.shapes
    # The copy that bias and penalties change, as they see it.
    assert ("aten::view", (rows * VOCAB,)) in made.shapes


@pytest.mark.parametrize(("batched", "longest"), [(256, 512), (256, 100), (250, 128)])
def test_tokens_fill_the_step_whatever_the_longest_sequence_is(
    path: Path, batched: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    make = largest_step.dummy_step

    def spy(num_seqs: int, each: int, device: torch.device) -> Any:
        asked.append((num_seqs, each))
        return make(num_seqs, each, device)

    monkeypatch.setattr(largest_step, "dummy_step", spy)
    run_largest_step(settings(path, max_num_batched_tokens=batched), decoder_of(path), longest)
    ((num_seqs, each),) = asked
    assert each <= longest
    assert batched - num_seqs < num_seqs * each <= batched
