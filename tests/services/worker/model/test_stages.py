"""What stages hand on, in threads."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.model.stages import StageSeam, shares_selection
from services.worker.model.stream import Stream
from services.worker.parallel.groups import Groups
from tests.services.worker.parallel.thread_groups import make_groups, run_together


def seams_of(spec: ModelSpec, ends: list[int]) -> list[StageSeam]:
    groups = make_groups("pp", len(ends))
    firsts = [0, *ends[:-1]]
    return [
        StageSeam(
            replace(
                spec,
                placement=Placement(first_layer=first, last_layer=end),
                groups=Groups(pp=group),
            )
        )
        for first, end, group in zip(firsts, ends, groups, strict=True)
    ]


def test_only_layers_without_an_indexer_share_a_selection(config: ModelConfig) -> None:
    # full, shared, full, shared; then the MTP layer, which has its own.
    assert [shares_selection(config, layer) for layer in range(5)] == [
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("ends", "passed_on"),
    [([2, 4], [False]), ([3, 4], [True]), ([1, 4], [True]), ([1, 2, 4], [True, False])],
)
def test_a_stage_gives_what_the_next_one_takes(
    spec: ModelSpec, ends: list[int], passed_on: list[bool]
) -> None:
    seams = seams_of(spec, ends)
    assert [seam.gives_topk for seam in seams] == [*passed_on, False]
    assert [seam.takes_topk for seam in seams] == [False, *passed_on]


def step_of(num_rows: int, num_attended: int | None = None) -> Any:
    step: Any = type("Step", (), {})()
    step.stream = Stream.alone(num_rows)
    step.num_rows = num_attended or num_rows
    return step


@pytest.mark.parametrize("ends", [[2, 4], [3, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_selection_arrive_as_they_left(
    spec: ModelSpec, ends: list[int], dtype: torch.dtype
) -> None:
    first, second = seams_of(replace(spec, dtype=dtype), ends)
    x, residual = torch.randn(2, 5, 64).to(dtype)
    topk = torch.randint(0, 9, (5, 1, 16), dtype=torch.int32)

    def work(rank: int) -> tuple[torch.Tensor, ...]:
        if rank:
            return second.receive(step_of(5))
        first.send(x, residual, topk)
        return ()

    arrived = run_together(work, 2)[1]
    assert torch.equal(arrived[0], x)
    assert torch.equal(arrived[1], residual)
    if second.takes_topk:
        assert torch.equal(arrived[2], topk)
    else:
        assert arrived[2].shape == (5, 1, 0)


def test_ranks_that_cut_tokens_pass_on_their_share_of_each(spec: ModelSpec) -> None:
    """Here the stream is cut to 3 rows and attention to 2."""
    first, second = seams_of(spec, [3, 4])
    x, residual = torch.randn(2, 3, 64)
    topk = torch.randint(0, 9, (2, 1, 16), dtype=torch.int32)

    def work(rank: int) -> tuple[torch.Tensor, ...]:
        if rank:
            return second.receive(step_of(3, 2))
        first.send(x, residual, topk)
        return ()

    arrived = run_together(work, 2)[1]
    assert torch.equal(arrived[0], x)
    assert torch.equal(arrived[2], topk)
