"""What is taken down of a step, what is refused, and that the record alone does the step again."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import CaptureError, record
from services.worker.graphs.recording import HostCall, KernelCall, Recording
from services.worker.ops.native import Native

ONES = torch.ones(8, 8)

Record = Callable[[Callable[[], object]], Recording]


@pytest.fixture
def take(library: Native, arena: Arena) -> Iterator[Record]:
    with torch.inference_mode():
        yield functools.partial(record, library, arena)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def step_on(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
    normed = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)[0]
    gated = torch.ops.npu.npu_swiglu(torch.ops.glm.linear(normed, weight))
    halves = torch.cat((gated[:, 2:], gated[:, :2]), 1)
    return halves.to(torch.bfloat16).float().add_(normed[:, :4].contiguous())


def test_a_record_does_the_step_again_on_what_is_there_now(take: Record, x: Tensor) -> None:
    weight, gamma = torch.randn(8, 8), torch.randn(8)
    step = functools.partial(step_on, x, weight, gamma)
    expected = step()
    recording = take(step)
    result = recording.result
    assert isinstance(result, Tensor)
    assert torch.equal(result, expected)
    x.neg_()
    recording.run()
    assert torch.equal(result, step())
    assert not torch.equal(result, expected)


def test_each_kernel_is_taken_down_with_its_operator(take: Record, x: Tensor) -> None:
    recording = take(lambda: torch.ops.npu.npu_swiglu(torch.ops.glm.linear(x, ONES)))
    calls = [step for step in recording.steps() if isinstance(step, KernelCall)]
    assert [call.operator for call in calls] == ["glm::linear", "npu::npu_swiglu"]
    assert [call.name for call in calls] == ["head_matmul", "swiglu"]
    assert calls[0].numbers == (3, 1, 8, 8, 8, 0)
    assert calls[0].addresses[0] == x.data_ptr()
    assert calls[0].addresses[2] == calls[1].addresses[0]


def test_tensors_that_only_the_step_made_stay_alive(take: Record, x: Tensor) -> None:
    def step() -> Tensor:
        shifted = torch.arange(64.0).view(8, 8)  # made by the host, once
        return torch.ops.glm.linear(x, shifted)

    with pytest.raises(CaptureError, match="aten::arange"):
        take(step)
    weights = [torch.arange(64.0).view(8, 8)]
    recording = take(lambda: torch.ops.glm.linear(x, weights[0]))
    expected = x @ weights[0]
    weights.clear()
    filling = [torch.full((8, 8), 7.0) for _ in range(50)]  # would take the freed memory
    recording.run()
    assert isinstance(recording.result, Tensor)
    torch.testing.assert_close(recording.result, expected)
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
        (lambda x: x.exp(), "aten::exp"),
        (lambda x: x * 2, "aten::mul"),
        (torch.nonzero, "aten::nonzero"),
    ],
)
def test_what_a_record_cannot_do_again_is_refused_by_name(
    take: Record, x: Tensor, read: Callable[[Tensor], object], name: str
) -> None:
    with pytest.raises(CaptureError, match=name) as caught:
        take(lambda: read(torch.ops.glm.linear(x, ONES)))
    assert "glm::linear" in str(caught.value)


def test_a_kernel_of_ours_may_not_hide_what_is_refused(take: Record, x: Tensor) -> None:
    """Without a compiled kernel an operator is made of torch's, which would be missing."""
    library = torch.library.Library("glm", "FRAGMENT")
    library.define("test_hidden(Tensor x) -> Tensor")
    library.impl("test_hidden", lambda x: x.exp(), "CPU")
    with pytest.raises(CaptureError, match=r"aten::exp.*glm::test_hidden"):
        take(lambda: torch.ops.glm.test_hidden(x))


def test_the_result_of_another_record_is_no_input(take: Record, x: Tensor) -> None:
    first = take(lambda: torch.ops.glm.linear(torch.ops.glm.linear(x, ONES), ONES)).result
    assert isinstance(first, Tensor)
    with pytest.raises(CaptureError, match="another recorded step"):
        take(lambda: torch.ops.glm.linear(first, ONES))


def test_nothing_is_noted_outside(take: Record, x: Tensor) -> None:
    recording = take(lambda: torch.ops.glm.linear(x, ONES))
    torch.ops.glm.linear(x, ONES)
    assert len(list(recording.steps())) == 1
    with pytest.raises(CaptureError):
        take(x.exp)
    torch.ops.glm.linear(x, ONES)


@pytest.fixture
def group(tmp_path: object) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_collective_is_done_by_the_host_between_kernels(take: Record, x: Tensor) -> None:

    def step() -> Tensor:
        product = torch.ops.glm.linear(x, ONES)
        dist.all_reduce(product)
        return torch.ops.glm.linear(product, ONES)

    expected = step()
    recording = take(step)
    steps = list(recording.steps())
    assert [type(step) for step in steps] == [KernelCall, HostCall, KernelCall]
    assert steps[1].operator == "c10d::allreduce_"
    x.neg_()
    recording.run()
    assert torch.equal(recording.result, -expected)  # type: ignore[arg-type]
