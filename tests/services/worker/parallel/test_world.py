import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.parallel.rendezvous import JoinError
from services.worker.parallel.topology import Topology
from services.worker.parallel.world import Membership, World, hccl_name, hccl_options
from shared.errors import ConfigError
from tests.services.worker.parallel.ranks import Ranks

CPU = torch.device("cpu")


def make_membership(**changes: Any) -> Membership:
    values = {
        "topology": Topology.parse("tp2"),
        "number": 0,
        "device": CPU,
        "rendezvous": "file:///tmp/none",
        "timeout_s": 5.0,
    }
    return Membership(**(values | changes))


@pytest.mark.parametrize("text", ["tp4", "tp2,pp2", "dp2,tp2,ep", "dp2,pp2,ep", "tp3,ep"])
def test_every_rank_has_the_groups_that_the_topology_lists(ranks: Ranks, text: str) -> None:
    topology = Topology.parse(text)
    found = ranks.run(topology.joint_size, "group_cases:build_groups", topology=text)
    for rank, groups in enumerate(found):
        listed = {
            group.name: list(group.members) for group in topology.groups() if rank in group.members
        }
        for name in ("tp", "pp", "dp", "ep", "mc2", "replica", "orders"):
            assert groups[name] == listed.get(name, [rank]), (rank, name)


def test_groups_of_the_same_ranks_share_a_communicator_but_for_fused_operators(
    ranks: Ranks,
) -> None:
    # tp and ep are one; mc2, replica and orders are for themselves.
    found = ranks.run(2, "group_cases:build_groups", topology="tp2,ep")
    assert found[0]["num_made"] == [4]


def test_ranks_of_one_machine_listen_to_nobody_else(ranks: Ranks) -> None:
    for addresses in ranks.run(2, "group_cases:listening_addresses"):
        assert set(addresses) == {"0100007F"}  # 127.0.0.1


def test_ranks_that_do_not_come_are_named(tmp_path: Any) -> None:
    membership = make_membership(
        topology=Topology.parse("tp4"), rendezvous=f"file://{tmp_path}/m", join_timeout_s=0.2
    )
    with pytest.raises(JoinError, match=r"ranks 1, 2, 3 of 4 are missing after \d+\.\d s"):
        World.join(membership)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rank: 2 is not below the 2 ranks of tp2"):
        make_membership(number=2)
    # Replicas that share nothing are worlds of their own.
    assert make_membership(topology=Topology.parse("dp2,tp2"), number=1).rank.tp_rank == 1
    with pytest.raises(ConfigError, match="is not below the 2 ranks"):
        make_membership(topology=Topology.parse("dp2,tp2"), number=2)


class Options:
    hccl_config: dict[str, Any]


@pytest.mark.parametrize(
    ("buffer_mib", "expected"),
    [(200, {"group_name": "ep", "hccl_buffer_size": 200}), (None, {"group_name": "ep"})],
)
def test_a_communicator_has_a_name_and_a_buffer(
    monkeypatch: pytest.MonkeyPatch, buffer_mib: int | None, expected: dict[str, Any]
) -> None:
    """The wheel's own class is tried in tests/npu_contract."""
    fake = SimpleNamespace(
        _C=SimpleNamespace(
            _distributed_c10d=SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=Options))
        )
    )
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    assert hccl_options("ep", buffer_mib).hccl_config == expected


def test_fused_operators_get_the_communicators_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    backend = SimpleNamespace(get_hccl_comm_name=lambda rank: f"hccl-{rank}")

    def get_backend(device: Any) -> Any:
        asked.append(device)
        return backend

    group: Any = SimpleNamespace(_get_backend=get_backend, rank=lambda: 3)
    monkeypatch.setattr(torch, "device", lambda name: name)
    assert hccl_name(group) == "hccl-3"
    assert asked == ["npu"]
