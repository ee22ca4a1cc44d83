from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.worker.graphs.arena import Arena
from services.worker.graphs.recorder import record
from services.worker.graphs.recording import HostCall, KernelCall, Recording, difference
from services.worker.ops.native import SIGNATURES, Native

CALL = KernelCall(
    operator="npu::npu_swiglu",
    name="swiglu",
    dtype=torch.float32,
    numbers=(0, 1),
    addresses=(0, 0),
)
GAMMA = torch.ones(4)


def make(library: Native, arena: Arena, step: Callable[[], tuple[Tensor, ...]]) -> Recording:
    with torch.inference_mode():
        return record(library, arena, step)


def test_every_kernel_can_be_called_from_a_record(library: Native) -> None:
    for name in SIGNATURES:
        dtypes = [t for t in (torch.float32, torch.bfloat16) if library.function(name, t)]
        assert all(library.addresses(name, dtype) for dtype in dtypes)


def test_numbers_of_both_kinds_arrive_in_their_places(library: Native, arena: Arena) -> None:
    """Whole numbers and fractions travel in registers of their own, and past them in memory."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))

    def step() -> tuple[Tensor, ...]:
        gating = torch.ops.npu.npu_moe_gating_top_k
        options = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
        weights, experts, _ = gating(logits, 2, routed_scaling_factor=2.5, eps=1e-3, **options)
        return weights, experts

    recording = make(library, arena, step)
    recording.run()
    assert all(map(torch.equal, recording.result, step()))


def test_a_kernel_that_refuses_is_named(library: Native, arena: Arena) -> None:
    slots, cache = torch.tensor([[1], [2]]), torch.zeros(4, 8)
    rows = torch.ones(2, 8)

    def step() -> tuple[Tensor, ...]:
        gated = torch.ops.npu.npu_swiglu(rows)
        torch.ops.npu.npu_scatter_nd_update_(cache, slots, rows)
        return (gated,)

    recording = make(library, arena, step)
    recording.run()
    slots[1] = 4
    with pytest.raises(ValueError, match="kernel scatter_rows"):
        recording.run()
    with pytest.raises(ValueError, match="kernel scatter_rows"):
        recording.measure()


def test_times_are_told_for_each_kernel(library: Native, arena: Arena) -> None:
    x = torch.ones(4, 8)
    swiglu = torch.ops.npu.npu_swiglu
    recording = make(library, arena, lambda: (swiglu(swiglu(x)),))
    times = recording.measure()
    assert [call.operator for call, _ in times] == ["npu::npu_swiglu"] * 2
    assert all(0 < seconds < 1 for _, seconds in times)
    assert torch.equal(recording.result[0], swiglu(swiglu(x)))


def test_what_is_written_to_the_arguments_is_what_kernels_get(
    library: Native, arena: Arena
) -> None:
    x = torch.ones(4, 8)
    recording = make(library, arena, lambda: (torch.ops.npu.npu_swiglu(x),))
    recording.run()
    x.fill_(2)
    (segment,) = recording.parts
    assert not isinstance(segment, HostCall)
    segment.arguments[0] = 3  # rows
    recording.run()
    one, two = (torch.ops.npu.npu_swiglu(torch.full((1, 8), float(n))) for n in (1, 2))
    assert torch.equal(recording.result[0], torch.cat((two, two, two, one)))


def test_host_calls_run_where_they_were(library: Native) -> None:
    told: list[str] = []
    hosts = [HostCall(operator=name, function=told.append, arguments=(name,)) for name in "abc"]
    recording = Recording(library, [hosts[0], CALL, *hosts[1:]], ())
    recording.run()
    assert told == ["a", "b", "c"]
    assert [call for call, _ in recording.measure()] == [CALL]
    assert list(recording.calls()) == [hosts[0], CALL, *hosts[1:]]


def test_the_same_step_has_no_difference(library: Native, arena: Arena) -> None:
    x = torch.ones(4, 8)
    calls = [
        next(make(library, arena, lambda: (torch.ops.npu.npu_swiglu(x),)).calls()) for _ in range(2)
    ]
    assert difference(*calls) == ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"numbers": (0, 2)}, r"npu_swiglu: numbers \(0, 1\) became \(0, 2\)"),
        ({"addresses": (0, 64)}, "npu_swiglu: addresses"),
        ({"name": "add"}, "npu_swiglu: name swiglu became add"),
        ({"operator": "npu::other"}, "operator npu::npu_swiglu became npu::other"),
        ({"dtype": torch.bfloat16}, "dtype torch.float32 became torch.bfloat16"),
    ],
)
def test_a_difference_is_told_by_operator(change: dict[str, object], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(difference(CALL, replace(CALL, **change)))


def test_a_host_call_in_place_of_a_kernel_is_a_difference() -> None:
    host = HostCall(operator="c10d::allreduce_", function=print)
    assert difference(CALL, host) == "npu::npu_swiglu became c10d::allreduce_"
    assert difference(host, host) == ""
    other = HostCall(operator="c10d::send", function=print)
    assert difference(host, other) == "c10d::allreduce_ became c10d::send"
