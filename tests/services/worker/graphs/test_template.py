"""Steps of all sizes from recordings of three."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import CaptureError, HostCall, KernelCall, Recording
from services.worker.graphs.template import Sample, Template
from services.worker.ops.native import Native

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
X16 = X.bfloat16()
SIZES = (12, 7, 2)


def step(num_rows: int) -> tuple[Tensor, ...]:
    product = torch.ops.glm.linear(X[:num_rows], WEIGHT)
    pairs = product.view(-1, 2, 4).flatten(0, 1)
    gated = torch.ops.npu.npu_swiglu(pairs)
    return product, torch.cat((gated, gated), 1)


def samples(
    library: Native, arena: Arena, function: Callable[[int], tuple[Tensor, ...]] = step
) -> list[Sample]:
    found: list[Sample] = []
    plan = None
    with torch.inference_mode():
        for num_rows in SIZES:
            taken = record(library, arena, lambda n=num_rows: function(n), plan)
            plan = plan or arena.loans
            found.append(Sample(num_rows=num_rows, recording=taken))
    return found


def test_every_size_gives_what_the_step_gives(library: Native, arena: Arena) -> None:
    template = Template(samples(library, arena))
    for num_rows in (12, 11, 1, 2, 7, 8, 12, 3):
        for result, expected in zip(template.run(num_rows), step(num_rows), strict=True):
            assert torch.equal(result, expected)


def test_rows_that_are_missing_are_left_alone(library: Native, arena: Arena) -> None:
    template = Template(samples(library, arena))
    (whole, _) = template.run(12)
    before = whole.clone()
    with torch.inference_mode():
        whole[3:] = 77
    template.run(3)
    assert torch.equal(whole[:3], before[:3])
    assert torch.equal(whole[3:], torch.full((9, 8), 77.0))


def test_times_are_told_at_any_size(library: Native, arena: Arena) -> None:
    found = samples(library, arena)
    template = Template(found)
    times = template.measure(5)
    assert [call for call, _ in times] == list(found[0].recording.calls())
    assert all(0 < seconds < 1 for _, seconds in times)
    assert torch.equal(template.run(5)[0], step(5)[0])


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            lambda n: (torch.ops.glm.linear(X[: 1 + n * n // 16], WEIGHT),),
            "a number of head_matmul",
        ),
        (lambda n: (torch.ops.npu.npu_rms_norm(X[:n], WEIGHT[0], 1 / n)[0],), "a number of rms"),
        (lambda n: step(n) if n > 2 else (X[:n].contiguous(),), "make different calls"),
        (lambda n: (torch.ops.npu.npu_swiglu(X[12 - n :]),), "npu_swiglu: addresses"),
        (lambda n: (torch.ops.npu.npu_swiglu(X[:n] if n > 7 else X16[:n]),), "dtype"),
    ],
)
def test_a_step_that_is_another_for_other_sizes_is_refused(
    library: Native,
    arena: Arena,
    function: Callable[[int], tuple[Tensor, ...]],
    told: str,
) -> None:
    with pytest.raises(CaptureError, match=told):
        Template(samples(library, arena, function))


def hosts(told: list[tuple[int, ...]], rows: Callable[[int], Tensor]) -> list[Sample]:
    def tell(tensors: list[Tensor], number: int) -> None:
        told.append((*tensors[0].shape, number))

    return [
        Sample(
            num_rows=num_rows,
            recording=Recording(
                native=None,  # type: ignore[arg-type]  # no kernel is called
                calls=[
                    HostCall(
                        operator="c10d::allreduce_", function=tell, arguments=([rows(num_rows)], 5)
                    )
                ],
                result=(X[:num_rows],),
            ),
        )
        for num_rows in SIZES
    ]


def test_calls_of_the_host_get_the_first_rows() -> None:
    told: list[tuple[int, ...]] = []
    memory = torch.zeros(24, 5)
    template = Template(hosts(told, lambda n: memory[: 2 * n]))
    assert torch.equal(template.run(3)[0], X[:3])
    template.run(12)
    assert told == [(6, 5, 5), (24, 5, 5)]


def test_calls_of_the_host_on_other_memory_are_refused() -> None:
    kept = [torch.zeros(12, 5) for _ in range(3)]
    taken = iter(kept)
    with pytest.raises(CaptureError, match="c10d::allreduce_"):
        Template(hosts([], lambda n: next(taken)[:n]))


def test_all_kernels_keep_their_fractions(library: Native, arena: Arena) -> None:
    gamma = torch.ones(8)
    found = samples(library, arena, lambda n: (torch.ops.npu.npu_rms_norm(X[:n], gamma, 0.25)[0],))
    result = Template(found).run(5)[0]
    assert torch.equal(result, torch.ops.npu.npu_rms_norm(X[:5], gamma, 0.25)[0])
    (call,) = found[0].recording.calls()
    assert isinstance(call, KernelCall)
    assert call.numbers == (12, 8, 8, 0.25)
