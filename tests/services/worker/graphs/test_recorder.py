"""What is taken down of a step, what is refused, and that the record alone does the step."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import CaptureError, HostCall, KernelCall, Recording
from services.worker.ops.native import Native

ONES = torch.ones(8, 8)

Step = Callable[[], tuple[Tensor, ...]]
Record = Callable[[Step], Recording]


@pytest.fixture
def take(library: Native, arena: Arena) -> Iterator[Record]:
    with torch.inference_mode():
        yield functools.partial(record, library, arena)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def step_on(x: Tensor, weight: Tensor, gamma: Tensor) -> tuple[Tensor, ...]:
    normed = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0]
    gated = torch.ops.npu.npu_swiglu(torch.ops.glm.linear(normed, weight))
    halves = torch.cat((gated[:, 2:], gated[:, :2]), 1)
    return (halves.to(torch.bfloat16).float().add_(normed[:, :4].contiguous()), normed)


def test_a_record_does_the_step_on_what_is_there_now(take: Record, x: Tensor) -> None:
    weight, gamma = torch.randn(8, 8), torch.randn(8)
    step = functools.partial(step_on, x, weight, gamma)
    recording = take(step)
    for _ in range(2):
        recording.run()
        assert all(map(torch.equal, recording.result, step()))
        x.neg_()


def test_while_recording_nothing_is_computed(take: Record) -> None:
    cache = torch.zeros(4, 8)
    slots = torch.tensor([[1]])

    def step() -> tuple[Tensor, ...]:
        return (torch.ops.npu.npu_scatter_nd_update_(cache, slots, ONES[:1]),)

    recording = take(step)
    assert not cache.any()
    recording.run()
    assert cache[1].all()


def test_each_kernel_is_taken_down_with_its_operator(take: Record, x: Tensor) -> None:
    recording = take(lambda: (torch.ops.npu.npu_swiglu(torch.ops.glm.linear(x, ONES)),))
    first, second = recording.calls()
    assert isinstance(first, KernelCall)
    assert isinstance(second, KernelCall)
    assert (first.operator, first.name) == ("glm::linear", "head_matmul")
    assert (second.operator, second.name) == ("npu::npu_swiglu", "swiglu")
    assert first.numbers == (3, 1, 8, 8, 8, 0, False)
    assert first.addresses[0] == x.data_ptr()
    assert first.addresses[2] == second.addresses[0]


def test_what_nobody_else_keeps_is_kept(take: Record, x: Tensor) -> None:
    weights = [torch.arange(64.0).view(8, 8)]
    expected = x @ weights[0]
    recording = take(lambda: (torch.ops.glm.linear(x, weights[0]),))
    weights.clear()
    filling = [torch.full((8, 8), 7.0) for _ in range(50)]  # would take the freed memory
    recording.run()
    torch.testing.assert_close(recording.result[0], expected)
    assert filling


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda x: x.sum().item(), "aten::sum"),
        (lambda x: x[0, 0].item(), "aten::_local_scalar_dense"),
        (lambda x: int(x[0, 0]), "aten::_local_scalar_dense"),
        (lambda x: bool(x[0, 0]), "aten::_local_scalar_dense"),
        (lambda x: x.tolist(), "aten::resolve_conj"),
        (lambda x: x.numpy(), "the host reads"),
        (lambda x: x.cpu(), "aten::to.dtype_layout"),
        (lambda x: x.to("cpu", torch.float32), "the host reads"),
        (lambda x: torch.tensor([1.0]), "aten::detach_"),
        (lambda x: torch.arange(3), "aten::arange"),
        (lambda x: x.exp(), "aten::exp"),
        (lambda x: x * 2, "aten::mul"),
        (torch.nonzero, "aten::nonzero"),
        (lambda x: x.t().contiguous(), "a recorded step takes rows without gaps"),
    ],
)
def test_what_a_record_cannot_do_is_refused_by_name(
    take: Record, x: Tensor, read: Callable[[Tensor], object], name: str
) -> None:
    def step() -> tuple[Tensor, ...]:
        read(torch.ops.glm.linear(x, ONES))
        return ()

    with pytest.raises(CaptureError, match=name):
        take(step)


def test_a_refusal_tells_behind_which_operator(take: Record, x: Tensor) -> None:
    """An operator without a compiled kernel is made of torch's, which would be missing."""
    library = torch.library.Library("glm", "FRAGMENT")
    library.define("test_hidden(Tensor x) -> Tensor")
    library.impl("test_hidden", lambda x: x.exp(), "CPU")
    with pytest.raises(CaptureError, match=r"aten::exp.*behind glm::test_hidden"):
        take(lambda: (torch.ops.glm.test_hidden(x),))


def test_what_an_earlier_record_computed_is_no_input(take: Record, x: Tensor) -> None:
    def twice() -> tuple[Tensor, ...]:
        return (torch.ops.glm.linear(torch.ops.glm.linear(x, ONES), ONES),)

    earlier = take(twice).result[0]
    with pytest.raises(CaptureError, match="another recorded step"):
        take(lambda: (torch.ops.glm.linear(earlier, ONES),))


def test_afterwards_operators_run_again(take: Record, x: Tensor) -> None:
    take(lambda: (torch.ops.glm.linear(x, ONES),))
    with pytest.raises(CaptureError):
        take(lambda: (x.exp(),))
    torch.testing.assert_close(torch.ops.glm.linear(x, ONES), x @ ONES)


@pytest.fixture
def group(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_is_done_by_the_host_between_kernels(take: Record, x: Tensor) -> None:
    def step() -> tuple[Tensor, ...]:
        product = torch.ops.glm.linear(x, ONES)
        dist.all_reduce(product)
        gathered = product.new_empty(3, 8)
        dist.all_gather_single(gathered, product)
        return (torch.ops.glm.linear(gathered, ONES),)

    recording = take(step)
    calls = list(recording.calls())
    kinds = [KernelCall, HostCall, HostCall, KernelCall]
    assert [type(call) for call in calls] == kinds
    assert calls[1].operator == "c10d::allreduce_"
    x.neg_()
    recording.run()
    assert torch.equal(recording.result[0], step()[0])
