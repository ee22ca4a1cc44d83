import pytest

from services.worker.sizing.communicators import communicators
from tests.services.worker.sizing.conftest import MakeDeployment

MIB = 1 << 20


@pytest.mark.parametrize(
    ("topology", "fields", "expected"),
    [
        ("tp1", {}, {}),
        ("tp16", {}, {("tp",): 200}),
        # One replica: tensor and expert groups have the same members and share; MC2 never does.
        ("tp16,ep", {}, {("tp", "ep"): 200, ("mc2",): 200}),
        ("tp16,dcp16,ep", {}, {("tp", "dcp", "ep"): 200, ("mc2",): 200}),
        ("dp2,tp8,ep", {}, {("tp",): 200, ("dp",): 50, ("ep",): 200, ("mc2",): 200}),
        ("pp2,tp8", {}, {("tp",): 200, ("pp",): 200}),
        # Replicas without expert parallelism never speak to each other.
        ("dp2,tp8", {}, {("tp",): 200}),
        # Every step of a decode node goes by the fused exchange: the expert group is never used.
        (
            "dp2,tp8,ep",
            {"max_num_batched_tokens": 192, "max_num_seqs": 192},
            {("tp",): 200, ("dp",): 50, ("mc2",): 200},
        ),
        ("tp16,ep", {"hccl_mib": 768}, {("tp", "ep"): 768, ("mc2",): 768}),
    ],
)
def test_groups_with_the_same_members_share_and_unused_ones_cost_nothing(
    make_deployment: MakeDeployment,
    topology: str,
    fields: dict[str, int],
    expected: dict[tuple[str, ...], int],
) -> None:
    fields = {"max_num_batched_tokens": 8192, **fields}
    found = communicators(make_deployment(topology, **fields), 0)
    assert {group.names: group.buffer_mib for group in found} == expected
    for group in found:
        assert group.num_bytes == 2 * group.buffer_mib * MIB


def test_ranks_of_all_stages_have_the_same_communicators(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment("dp2,pp2[41/37],tp8,ep", max_num_batched_tokens=8192)
    first, other = (communicators(deployment, rank) for rank in (0, 8))
    assert first == other
    assert [group.size for group in first] == [8, 2, 2, 16, 16]
