"""The choice among the compiled builds, their threads, and what a kernel's status becomes."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker import ops
from services.worker.ops import dense, native, registry
from services.worker.ops.variants import VARIANTS, cpu_flags


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_the_best_build_this_cpu_runs_is_loaded(compiled: dict[str, Any]) -> None:
    loaded = native.load()
    assert loaded is not None
    best = next(v for v in VARIANTS if v.is_buildable and v.flags <= cpu_flags())
    assert loaded.path.name == f"glm_{best.name}.so"


def test_a_cpu_without_the_flags_takes_the_portable_build(
    compiled: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cpu_flags", frozenset)
    loaded = native.load()
    assert loaded is not None
    assert loaded.path.name == "glm_portable.so"


def test_without_a_build_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "library_path", lambda variant: tmp_path / variant.name)
    assert native.load() is None


def test_an_index_outside_its_tensor_becomes_an_error(compiled: dict[str, Any]) -> None:
    library = next(iter(compiled.values()))
    with pytest.raises(ValueError, match="outside its tensor"):
        library.call(
            "scatter_rows",
            torch.float32,
            (1, 4, 4, 2),
            torch.tensor([2]),
            torch.zeros(4),
            torch.zeros(8),
        )


@pytest.fixture
def four_threads(compiled: dict[str, Any]) -> Iterator[Any]:
    library = next(iter(compiled.values()))
    library.set_num_threads(4)
    yield library
    library.set_num_threads(1)


def test_results_do_not_depend_on_the_number_of_threads(
    four_threads: Any, generator: torch.Generator
) -> None:
    """Every item is done once: with helpers late, early and at work when the caller ends."""
    x = torch.randn((300, 64), generator=generator)
    weight = torch.randn((64, 500), generator=generator)
    linear = dense.kernels(four_threads)["linear"]
    four_threads.set_num_threads(1)
    expected = linear(x, weight)
    for threads in (2, 3, 4):
        four_threads.set_num_threads(threads)
        for _ in range(200):
            assert torch.equal(linear(x, weight), expected)


def test_helpers_that_slept_are_woken(four_threads: Any, generator: torch.Generator) -> None:
    x = torch.randn((4096, 64), generator=generator)
    swiglu = registry.cpu_kernels(four_threads)["npu_swiglu"]
    expected = swiglu(x)
    for _ in range(20):
        threading.Event().wait(0.002)  # longer than a helper looks for work before it sleeps
        assert torch.equal(swiglu(x), expected)


class Notes:
    def __init__(self) -> None:
        self.taken: list[tuple[str, tuple[float, ...]]] = []

    def note(
        self, name: str, dtype: torch.dtype, arguments: tuple[float, ...], tensors: tuple[Any, ...]
    ) -> None:
        assert dtype is torch.float32
        self.taken.append((name, arguments))


def test_calls_are_noted_and_not_run_inside(compiled: dict[str, Any]) -> None:
    library, notes = next(iter(compiled.values())), Notes()
    x, y = torch.ones(2, 8), torch.zeros(2, 4)
    addresses = (x.data_ptr(), y.data_ptr())
    with library.noted_by(notes):
        library.call("swiglu", torch.float32, (2, 4), x, y)
        run = library.function("swiglu", torch.float32)
        assert run(1, 4, *addresses) == 0
        assert library.function("draw", torch.bfloat16) is None
    assert not y.any()
    library.call("swiglu", torch.float32, (2, 4), x, y)
    assert y.all()
    assert notes.taken == [("swiglu", (2, 4, *addresses)), ("swiglu", (1, 4, *addresses))]


def test_an_error_ends_the_notes(compiled: dict[str, Any]) -> None:
    library = next(iter(compiled.values()))
    with pytest.raises(KeyError), library.noted_by(Notes()):
        raise KeyError
    with library.noted_by(Notes()):
        pass


def test_one_library_is_one_object(compiled: dict[str, Any]) -> None:
    first = native.load()
    native.load.cache_clear()
    assert native.load() is first


def test_torch_keeps_one_thread_beside_the_compiled_kernels(compiled: dict[str, Any]) -> None:
    before = torch.get_num_threads()
    ops.set_num_threads(2)
    assert torch.get_num_threads() == 1
    ops.set_num_threads(1)
    torch.set_num_threads(before)


def test_without_compiled_kernels_the_threads_are_torchs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "library_path", lambda variant: tmp_path / variant.name)
    before = torch.get_num_threads()
    ops.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
