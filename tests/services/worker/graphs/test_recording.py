from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import HostCall, KernelCall, Recording
from services.worker.ops.native import SIGNATURES, Native


def make(library: Native, arena: Arena, step: Callable[[], object]) -> Recording:
    with torch.inference_mode():
        return record(library, arena, step)


def test_every_kernel_can_be_called_from_a_record(library: Native) -> None:
    for name in SIGNATURES:
        dtypes = [t for t in (torch.float32, torch.bfloat16) if library.function(name, t)]
        assert all(library.addresses(name, dtype) for dtype in dtypes)


def test_numbers_of_both_kinds_arrive_in_their_places(library: Native, arena: Arena) -> None:
    """Whole numbers and fractions travel in registers of their own, and past them in memory."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def step() -> object:
        gating = torch.ops.npu.npu_moe_gating_top_k
        options = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
        return gating(logits, 2, routed_scaling_factor=2.5, eps=1e-3, **options)[:2]

    expected = step()
    recording = make(library, arena, step)
    weights, experts = recording.result  # type: ignore[misc]
    with torch.inference_mode():
        weights.zero_()
        experts.zero_()
    recording.run()
    assert torch.equal(weights, expected[0])  # type: ignore[index]
    assert torch.equal(experts, expected[1])  # type: ignore[index]


def test_a_kernel_that_refuses_is_named(library: Native, arena: Arena) -> None:
    slots, cache = torch.tensor([1, 2]), torch.zeros(4, 8)
    rows = torch.ones(2, 8)

    def step() -> Tensor:
        gated = torch.ops.npu.npu_swiglu(rows)
        torch.ops.npu.npu_scatter_nd_update_(cache, slots.view(-1, 1), rows)
        return gated

    recording = make(library, arena, step)
    recording.run()
    slots[1] = 4
    with pytest.raises(ValueError, match="scatter_rows"):
        recording.run()


def test_times_are_told_for_each_kernel(library: Native, arena: Arena) -> None:
    x = torch.ones(4, 8)
    recording = make(library, arena, lambda: torch.ops.npu.npu_swiglu(torch.ops.npu.npu_swiglu(x)))
    times = recording.measure()
    assert [step.operator for step, _ in times] == ["npu::npu_swiglu"] * 2
    assert all(0 < seconds < 1 for _, seconds in times)


def test_a_difference_is_told_by_operator(library: Native, arena: Arena) -> None:
    x = torch.ones(4, 8)

    def make_one(count: int, source: Tensor) -> Recording:
        def step() -> Tensor:
            gated = torch.ops.npu.npu_swiglu(source[:count])
            return torch.ops.npu.npu_rms_norm(gated, torch.ones(4), 1e-5)[0]

        return make(library, arena, step)

    gamma = torch.ones(4)
    first = make(library, arena, lambda: torch.ops.npu.npu_rms_norm(x[:, :4], gamma, 1e-5)[0])
    again = make(library, arena, lambda: torch.ops.npu.npu_rms_norm(x[:, :4], gamma, 1e-5)[0])
    assert first.difference(again) == ""
    changed = make(library, arena, lambda: torch.ops.npu.npu_rms_norm(x[:, :4], gamma, 1e-6)[0])
    assert "npu_rms_norm: numbers (4, 4, 8, 1e-05) became" in first.difference(changed)
    other = make(library, arena, lambda: torch.ops.npu.npu_rms_norm(x[:, 4:], gamma, 1e-5)[0])
    assert "npu_rms_norm: addresses" in first.difference(other)


def test_more_or_other_calls_are_a_difference(library: Native) -> None:
    call = KernelCall(
        operator="glm::linear", name="swiglu", dtype=torch.float32, numbers=(0, 1), addresses=(0, 0)
    )
    host = HostCall(operator="c10d::allreduce_", run=lambda: None)
    one = Recording(library, [call], None)
    assert one.difference(Recording(library, [call, call], None)) == "1 calls became 2"
    assert "became" in one.difference(Recording(library, [host], None))


def test_host_calls_run_where_they_were(library: Native) -> None:
    told: list[str] = []
    hosts = [HostCall(operator=name, run=lambda name=name: told.append(name)) for name in "abc"]
    recording = Recording(library, hosts, "result")
    recording.run()
    assert told == ["a", "b", "c"]
    assert [step.operator for step, _ in recording.measure()] == []
