"""Memory of the KV blocks is there before they are used."""

import errno
import logging
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker import prefault as prefault_module
from services.worker.kv_cache import KVCaches, LayerCache, allocate, bytes_per_block
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.ops.pages import populate
from services.worker.prefault import prefault

MIB = 1 << 20
NUM_BLOCKS = 53
"""As no other test has."""
CPU = torch.device("cpu")


def caches_of(values: dict[str, Any], num_bytes: int) -> KVCaches:
    spec = ModelSpec(config=ModelConfig.from_dict(values), dtype=torch.bfloat16, device=CPU)
    return allocate(spec, num_bytes // bytes_per_block(spec))


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def write_everywhere(caches: KVCaches) -> int:
    """Write to each page of 4 KiB; how many of these the system had to give first."""
    before = num_faults()
    for tensor in caches.tensors():
        tensor.view(torch.uint8).flatten()[:: 4 << 10].fill_(1)
    return num_faults() - before


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page of 4 KiB is given by itself, whatever the machine does with large ones."""
    monkeypatch.setattr("services.worker.kv_cache.prefer_huge_pages", lambda tensor: None)


def gives_pages_one_by_one() -> bool:
    """Whether this system can be asked for them, and gives large ones only when asked."""
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_asked = not told.exists() or "[always]" not in told.read_text()
    return is_asked and populate(torch.zeros(MIB), 0, MIB) == 0


@pytest.mark.skipif(not gives_pages_one_by_one(), reason="pages of this system come otherwise")
@pytest.mark.usefixtures("small_pages")
def test_a_write_waits_for_no_page_once_the_memory_was_taken(tiny_values: dict[str, Any]) -> None:
    # Latents of over 32 MiB: what is smaller may be memory that other tests gave back.
    cold = write_everywhere(caches_of(tiny_values, 192 * MIB))
    caches = caches_of(tiny_values, 192 * MIB)
    prefault(caches).join()
    warm = write_everywhere(caches)
    # A system may give several of the 49,152 at once; the interpreter takes some of its own.
    assert cold > 500
    assert warm < cold / 10


def test_what_is_written_meanwhile_stays(tiny_values: dict[str, Any]) -> None:
    caches = caches_of(tiny_values, 256 * MIB)
    thread = prefault(caches)
    for tensor in caches.tensors():
        tensor[1:].fill_(3)
    thread.join()
    for tensor in caches.tensors():
        assert not tensor[0].any()
        assert bool((tensor[1:] == 3).all())


class Pieces:
    """Stands for the system's call: what was asked of it, and its answer from some call on.

    Caches of other tests may still be taken meanwhile: only tensors of this one are looked at.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []
        """Bytes of the tensor, first and last byte that are wanted."""
        self.error, self.good_calls = 0, 1 << 30

    def __call__(self, tensor: Tensor, first: int, last: int) -> int:
        if tensor.shape[0] != NUM_BLOCKS:
            return 0
        self.asked.append((tensor.nbytes, first, last))
        return self.error if len(self.asked) > self.good_calls else 0


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    pieces = Pieces()
    monkeypatch.setattr(prefault_module, "populate", pieces)
    return pieces


def two_widths() -> KVCaches:
    num_blocks = NUM_BLOCKS
    latent = torch.zeros((num_blocks, 128, 1, 512), dtype=torch.bfloat16)
    layer = LayerCache(latent=latent, rope=torch.zeros((num_blocks, 128, 1, 64)), indexer=None)
    return KVCaches(layers=(layer, layer), num_blocks=num_blocks)


def test_blocks_come_in_the_order_in_which_they_are_given_out(pieces: Pieces) -> None:
    caches = two_widths()
    prefault(caches).join()
    shares = [round(first / size, 6) for size, first, _ in pieces.asked]
    assert shares == sorted(shares)
    assert len(set(shares)) == 4
    for tensor in caches.tensors():
        own = [(first, last) for size, first, last in pieces.asked if size == tensor.nbytes]
        # Twice, since both layers are alike.
        assert [first for first, _ in own] == [0, 0, *(last for _, last in own[:-2])]
        assert own[-1][1] == tensor.nbytes


def test_it_rests_as_long_as_it_worked(pieces: Pieces, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    clock = iter(number**2 for number in range(1000))
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=rests.append)
    monkeypatch.setattr(prefault_module, "time", fake)
    caches = two_widths()  # which somebody holds
    prefault(caches).join()
    assert len(rests) == len(pieces.asked)
    # Between the looks at the clock before and behind each piece.
    assert rests[:4] == [1, 5, 9, 13]


@pytest.mark.parametrize(
    ("error", "told"), [(errno.ENOMEM, "no memory left for KV blocks"), (errno.EINVAL, "")]
)
def test_a_system_that_gives_none_is_asked_once_and_nothing_fails(
    pieces: Pieces, caplog: pytest.LogCaptureFixture, error: int, told: str
) -> None:
    caplog.set_level(logging.INFO, "services.worker.prefault")
    pieces.error, pieces.good_calls = error, 5
    caches = two_widths()  # which somebody holds
    prefault(caches).join()
    assert len(pieces.asked) == 6
    assert [told in record.message for record in caplog.records] == ([True] if told else [])


def test_without_a_thread_for_it_nothing_fails(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    caplog.set_level(logging.WARNING, "services.worker.prefault")
    prefault(two_widths())
    assert not pieces.asked
    assert "can't start new thread" in caplog.text


def test_caches_that_are_gone_are_left_alone(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_gone = threading.Event()

    def after_they_are(tensor: Tensor, first: int, last: int) -> int:
        assert are_gone.wait(30)
        return pieces(tensor, first, last)

    monkeypatch.setattr(prefault_module, "populate", after_they_are)
    caches = two_widths()
    thread = prefault(caches)
    del caches
    are_gone.set()
    thread.join()
    assert len(pieces.asked) == 1


def test_caches_on_a_device_are_not_the_systems(pieces: Pieces) -> None:
    layer = LayerCache(
        latent=torch.zeros((NUM_BLOCKS, 128, 1, 512), device="meta"), rope=None, indexer=None
    )
    caches = KVCaches(layers=(layer,), num_blocks=NUM_BLOCKS)
    prefault(caches).join()
    assert not pieces.asked
