from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorded_function import RecordedFunction
from services.worker.graphs.recording import CaptureError
from services.worker.ops.native import Native

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))


def product(num_rows: int) -> tuple[Tensor, ...]:
    """One row lies flat where several do not: it takes a call less."""
    left = X[:num_rows, :4].contiguous()
    return (torch.ops.npu.npu_swiglu(torch.ops.glm.linear(X[:num_rows], WEIGHT)), left)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 5, 8, 33, 40])
def test_each_number_of_rows_gives_what_the_function_gives(
    library: Native, arena: Arena, max_rows: int
) -> None:
    recorded = RecordedFunction(library, arena, product, max_rows)
    for num_rows in (max_rows, *range(1, max_rows + 1), 1):
        results = recorded.run(num_rows)
        assert all(map(torch.equal, results, product(num_rows)))


@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_times_are_told(library: Native, arena: Arena, num_rows: int) -> None:
    recorded = RecordedFunction(library, arena, product, 40)
    calls = [call.operator for call, seconds in recorded.measure(num_rows) if seconds < 1]
    first = [] if num_rows == 1 else ["aten::clone"]
    assert calls == [*first, "glm::linear", "npu::npu_swiglu"]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda n: (torch.ops.glm.linear(X[: max(1, n * n // 40)], WEIGHT),), "head_matmul"),
        (lambda n: (X[:n].exp(),), "aten::exp"),
    ],
)
def test_what_cannot_be_recorded_is_told_at_once(
    library: Native, arena: Arena, function: Callable[[int], tuple[Tensor, ...]], told: str
) -> None:
    with pytest.raises(CaptureError, match=told):
        RecordedFunction(library, arena, function, 40)
