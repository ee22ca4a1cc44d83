from dataclasses import replace
from pathlib import Path

import pytest

from services.launcher.ranks import Layout, check_fit, own_devices, rank_flags, threads_per_rank
from services.worker.settings import WorkerSettings
from shared.config import parse
from shared.errors import ConfigError


def test_one_rank_is_the_plain_worker() -> None:
    (rank,) = Layout().ranks()
    assert (rank.name, rank.world, rank.number, rank.is_leader) == ("worker", 0, 0, True)
    assert not rank_flags(Layout(), rank, Path("/r/meet"))


def test_ranks_of_a_replica_are_one_world_led_by_its_first() -> None:
    ranks = list(Layout(tensor_parallel_size=2, pipeline_parallel_size=2).ranks())
    assert [rank.name for rank in ranks] == ["worker", "worker.1", "worker.2", "worker.3"]
    assert [rank.number for rank in ranks] == [0, 1, 2, 3]
    assert [rank.is_leader for rank in ranks] == [True, False, False, False]
    assert {rank.world for rank in ranks} == {0}


def test_replicas_are_worlds_of_their_own_unless_they_share_experts() -> None:
    apart = Layout(tensor_parallel_size=2, data_parallel_size=2)
    assert [(rank.world, rank.number) for rank in apart.ranks()] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    joint = Layout(tensor_parallel_size=2, data_parallel_size=2, enable_expert_parallel=True)
    assert [(rank.world, rank.number) for rank in joint.ranks()] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    for layout in (apart, joint):
        assert [rank.replica for rank in layout.ranks()] == [0, 0, 1, 1]
        assert [rank.is_leader for rank in layout.ranks()] == [True, False, True, False]


def test_a_rank_is_told_the_layout_its_number_and_where_to_meet() -> None:
    layout = Layout(pipeline_parallel_size=2, enable_expert_parallel=True)
    flags = [str(word) for word in rank_flags(layout, list(layout.ranks())[1], Path("/r/meet"))]
    assert flags == [
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"),
        *("--rank", "1", "--rendezvous", "file:///r/meet", "--enable-expert-parallel"),
    ]


def test_only_replicas_of_one_world_are_told_of_each_other() -> None:
    apart = Layout(tensor_parallel_size=2, data_parallel_size=2)
    joint = Layout(data_parallel_size=2, enable_expert_parallel=True)
    assert "--data-parallel-size" not in rank_flags(apart, list(apart.ranks())[2], Path("/m"))
    words = rank_flags(joint, list(joint.ranks())[1], Path("/m"))
    assert words[-4:] == ["--data-parallel-size", 2, "--data-parallel-rank", 1]


def test_ranks_are_told_to_cut_tokens_where_there_is_someone_to_share_them_with() -> None:
    layout = Layout(tensor_parallel_size=2, enable_dsa_cp=True, enable_flashcomm1=True)
    for rank in layout.ranks():
        words = rank_flags(layout, rank, Path("/m"))
        assert words[-2:] == ["--enable-dsa-cp", "--enable-flashcomm1"]
    stages = replace(layout, tensor_parallel_size=1, pipeline_parallel_size=2)
    words = rank_flags(stages, next(stages.ranks()), Path("/m"))
    assert not {"--enable-dsa-cp", "--enable-flashcomm1"} & set(map(str, words))


@pytest.mark.parametrize(("cores", "most"), [(1, 4), (2, 4), (8, 16)])
def test_more_ranks_than_the_cores_can_run_are_refused_by_name(cores: int, most: int) -> None:
    check_fit(
        Layout(tensor_parallel_size=most), device="cpu", visible_devices=None, num_cores=cores
    )
    with pytest.raises(ConfigError, match=rf"--tensor-parallel-size {2 * most} x .* {most},"):
        check_fit(
            Layout(tensor_parallel_size=2 * most),
            device="cpu",
            visible_devices=None,
            num_cores=cores,
        )


def test_more_ranks_than_visible_devices_are_refused() -> None:
    layout = Layout(tensor_parallel_size=2, data_parallel_size=2)
    check_fit(layout, device="npu", visible_devices="0,1,2,3", num_cores=1)
    check_fit(layout, device="npu", visible_devices=None, num_cores=1)
    with pytest.raises(ConfigError, match=r"4 ranks .* 3 devices of ASCEND_RT_VISIBLE_DEVICES"):
        check_fit(layout, device="npu", visible_devices="0,1,2", num_cores=99)


def test_stages_are_cut_as_they_were_asked_for() -> None:
    layout = Layout(pipeline_parallel_size=2, layer_partition=(3, 2))
    words = rank_flags(layout, next(layout.ranks()), Path("/m"))
    assert words[-2:] == ["--pp-layer-partition", "3,2"]


def test_a_worker_knows_every_flag_of_a_rank() -> None:
    layout = Layout(
        pipeline_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        layer_partition=(3, 2),
    )
    words = ["--address", "unix:/a", "--model", "/m"]
    words += [str(word) for word in rank_flags(layout, list(layout.ranks())[3], Path("/m"))]
    settings = parse(WorkerSettings, words)
    assert (settings.data_parallel_rank, settings.rank, settings.world_rank) == (1, 1, 3)
    assert str(settings.topology) == "dp2,pp2[3/2],tp1,ep"
    assert settings.rendezvous == "file:///m"


def test_ranks_share_the_cores() -> None:
    assert threads_per_rank(Layout(tensor_parallel_size=2), 8) == 4
    assert threads_per_rank(Layout(tensor_parallel_size=4), 2) == 1


def test_worlds_that_number_their_ranks_alike_see_different_devices() -> None:
    apart = Layout(tensor_parallel_size=2, data_parallel_size=2)
    found = [own_devices(apart, rank, "4,5,6,7") for rank in apart.ranks()]
    assert found == ["4,5", "4,5", "6,7", "6,7"]
    assert own_devices(apart, list(apart.ranks())[2], None) == "2,3"
    alone = Layout(tensor_parallel_size=2)
    assert [own_devices(alone, rank, None) for rank in alone.ranks()] == [None, None]


def test_each_scheduler_has_the_whole_layout_for_itself() -> None:
    layout = Layout(data_parallel_size=2, enable_expert_parallel=True, num_schedulers=2)
    ranks = list(layout.ranks())
    assert [rank.scheduler for rank in ranks] == [0, 0, 1, 1]
    assert [rank.replica for rank in ranks] == [0, 1, 0, 1]
    assert [rank.world for rank in ranks] == [0, 0, 1, 1]
    assert [rank.is_leader for rank in ranks] == [True] * 4
    words = rank_flags(layout, ranks[3], Path("/m"))
    assert words[-4:] == ["--data-parallel-size", 2, "--data-parallel-rank", 1]


def test_schedulers_divide_cores_and_devices_among_their_workers() -> None:
    layout = Layout(num_schedulers=4)
    assert threads_per_rank(layout, 8) == 2
    assert [own_devices(layout, rank, "4,5,6,7") for rank in layout.ranks()] == list("4567")
    with pytest.raises(ConfigError, match=r"--scheduler-count 4 x .* 4 ranks are more than the 2"):
        check_fit(layout, device="npu", visible_devices="4,5", num_cores=1)
    with pytest.raises(ConfigError, match=r"--scheduler-count 5 x .* 5 ranks are more than 4"):
        check_fit(Layout(num_schedulers=5), device="cpu", visible_devices=None, num_cores=1)
