import pytest

from services.worker.parallel.moe_method import MoeMethod
from services.worker.sizing.moe_traffic import (
    has_mc2,
    mc2_capacity,
    mc2_shortage_mib,
    mc2_window_mib,
    moe_method,
    moe_methods,
)
from tests.services.worker.sizing.conftest import MakeDeployment


@pytest.mark.parametrize(
    ("topology", "hardware", "tokens", "method"),
    [
        # No expert parallelism: every rank has a part of all experts.
        ("tp16", "a3", 64, MoeMethod.ALLGATHER),
        # A3: the fused exchange up to its capacity, all-to-all above.
        ("dp2,tp8,ep", "a3", 64, MoeMethod.MC2),
        ("dp2,tp8,ep", "a3", 8192, MoeMethod.ALLTOALL),
        # A2: the fused exchange from 16 ranks on, all-gather above and below.
        ("dp2,tp8,ep", "a2", 64, MoeMethod.MC2),
        ("dp2,tp8,ep", "a2", 8192, MoeMethod.ALLGATHER),
        ("tp8,ep", "a2", 64, MoeMethod.ALLGATHER),
    ],
)
def test_the_method_follows_device_ranks_and_tokens(
    make_deployment: MakeDeployment, topology: str, hardware: str, tokens: int, method: MoeMethod
) -> None:
    deployment = make_deployment(topology, "w4a8c8", hardware, max_num_seqs=64)
    assert moe_method(deployment, tokens) is method


def test_a2_has_the_fused_exchange_up_to_24_experts_a_device(
    make_deployment: MakeDeployment,
) -> None:
    # 256 experts on 16 ranks are 16 each; on 8 ranks there would be 32.
    assert has_mc2(make_deployment("dp2,tp8,ep", hardware="a2"))
    assert not has_mc2(make_deployment("tp8,ep", hardware="a2"))
    assert has_mc2(make_deployment("tp8,ep", hardware="a3"))
    assert not has_mc2(make_deployment("tp16", hardware="a3"))


def test_capacity_is_that_of_the_largest_captured_step(make_deployment: MakeDeployment) -> None:
    sized = make_deployment("tp16,ep", capture_sizes=(4, 16, 128))
    assert mc2_capacity(sized) == 128
    eager = make_deployment("tp16,ep", is_eager=True, max_num_seqs=64, num_speculative_tokens=1)
    assert mc2_capacity(eager) == 128
    # At most 512 tokens a rank on A3, 256 on A2.
    many = {"max_num_seqs": 4096, "max_num_batched_tokens": 65536, "is_eager": True}
    many["hccl_mib"] = 65536
    assert mc2_capacity(make_deployment("tp2,ep", **many)) == 1024
    a2 = make_deployment("dp8,tp2,ep", hardware="a2", **many)
    assert mc2_capacity(a2) == 512


def test_the_window_follows_cans_conditions(make_deployment: MakeDeployment) -> None:
    # A3, 12 tokens a rank, 16 ranks, 16 experts each, rows of 12,288 bytes in slots of 12,800:
    # 2 x (16 x 12 x 16 x 12,800 + 9 x 12 x 12,288) bytes = 77.5 MiB.
    a3 = make_deployment("dp2,tp8,ep", capture_sizes=(96,))
    assert mc2_window_mib(a3) == 78
    # A2: 2 x (12 x 16 x min(16, 8) x 12,288 bytes + 2 MiB) = 40.0 MiB.
    a2 = make_deployment("dp2,tp8,ep", hardware="a2", capture_sizes=(96,))
    assert mc2_window_mib(a2) == 40
    assert mc2_window_mib(make_deployment("tp16")) == 0


def test_a_buffer_without_room_for_the_window_is_found(make_deployment: MakeDeployment) -> None:
    small = make_deployment("dp16,tp2,ep", capture_sizes=(192,), hccl_mib=256)
    assert mc2_shortage_mib(small) == mc2_window_mib(small) > 256
    large = make_deployment("dp16,tp2,ep", capture_sizes=(192,), hccl_mib=800)
    assert mc2_shortage_mib(large) == 0


def test_steps_that_the_window_has_no_room_for_go_another_way(
    make_deployment: MakeDeployment,
) -> None:
    """8 MiB more for each token of a rank: 2 x 16 x 16 x 12,800 bytes, and what returns."""
    full = make_deployment("dp2,tp8,ep", capture_sizes=(96,), hccl_mib=78)
    assert moe_method(full, 96) is MoeMethod.MC2
    less = make_deployment("dp2,tp8,ep", capture_sizes=(96,), hccl_mib=77)
    assert mc2_capacity(less) == 88
    assert moe_method(less, 88) is MoeMethod.MC2
    assert moe_method(less, 89) is MoeMethod.ALLTOALL
    # 2 MiB each way are taken whatever is sent on A2.
    none = make_deployment("dp2,tp8,ep", hardware="a2", hccl_mib=4)
    assert not has_mc2(none)
    assert moe_methods(none) == {MoeMethod.ALLGATHER}
    assert mc2_shortage_mib(none) > 4


def test_a_deployment_may_use_two_methods(make_deployment: MakeDeployment) -> None:
    mixed = make_deployment("dp2,tp8,ep", max_num_seqs=12, max_num_batched_tokens=8192)
    assert moe_methods(mixed) == {MoeMethod.MC2, MoeMethod.ALLTOALL}
    decode = make_deployment("dp2,tp8,ep", max_num_seqs=12, max_num_batched_tokens=12)
    assert moe_methods(decode) == {MoeMethod.MC2}
