import pytest

from services.worker.model.config import ModelConfig
from services.worker.parallel.topology import Rank, Topology, read_partition
from shared.errors import ConfigError

# The layouts of the deployment guide: text, ranks, ranks of an expert group.
GUIDE = [
    ("dp2,tp8,ep", 16, 16),
    ("dp4,tp8,ep", 32, 32),
    ("pp2[41/37],tp16,ep", 32, 16),
    ("dp16,tp2,ep", 32, 32),
    ("dp8,tp4,ep", 32, 32),
    ("tp16,dcp16,ep", 16, 16),
    ("dp4,tp8,dcp8,ep", 32, 32),
    ("dp2,tp16,dcp16,ep", 32, 32),
    ("tp16", 16, 1),
]


@pytest.mark.parametrize(("text", "world", "experts"), GUIDE)
def test_sizes_of_the_guides_layouts(text: str, world: int, experts: int) -> None:
    topology = Topology.parse(text)
    assert (topology.world_size, topology.expert_parallel_size) == (world, experts)


@pytest.mark.parametrize("text", [text for text, _, _ in GUIDE])
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    topology = Topology.parse(text)
    assert Topology.parse(str(topology)) == topology


def test_ranks_count_tensor_ranks_first_then_stages_then_replicas() -> None:
    topology = Topology.parse("dp2,pp2,tp4,ep")
    assert topology.rank_of(Rank(dp_rank=1, pp_rank=0, tp_rank=3)) == 1 * 8 + 0 * 4 + 3
    numbers = [topology.rank_of(topology.coordinates(number)) for number in range(16)]
    assert numbers == list(range(16))


def test_groups_are_created_in_one_order_and_cover_the_world() -> None:
    topology = Topology.parse("dp2,pp2,tp4,dcp4,ep")
    groups = topology.groups()
    order = list(dict.fromkeys(group.name for group in groups))
    assert order == ["world", "replica", "orders", "tp", "dcp", "pp", "dp", "ep", "mc2"]
    for name in order:
        members = [rank for group in groups if group.name == name for rank in group.members]
        assert sorted(members) == list(range(16)), name

    def of(name: str) -> list[tuple[int, ...]]:
        return [group.members for group in groups if group.name == name]

    assert of("tp") == of("dcp") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert of("pp")[0] == (0, 4)
    assert of("dp")[0] == (0, 8)
    # Expert groups take the tensor ranks of all replicas, but one stage.
    assert of("ep") == of("mc2") == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]


def test_replicas_without_expert_parallelism_are_worlds_of_their_own() -> None:
    groups = Topology.parse("dp2,tp4").groups()
    assert {rank for group in groups for rank in group.members} == {0, 1, 2, 3}
    assert not {group.name for group in groups} & {"ep", "mc2"}


def test_stages_follow_the_partition_or_are_even(glm: ModelConfig) -> None:
    assert Topology.parse("pp2[41/37]").stages(glm) == (range(41), range(41, 78))
    # 78 = 4 x 19 + 2: one more each for the stages before the last, from the back.
    sizes = [len(stage) for stage in Topology.parse("pp4").stages(glm)]
    assert sizes == [19, 20, 20, 19]


def test_a_rank_is_placed_by_its_coordinates(glm: ModelConfig) -> None:
    topology = Topology.parse("dp2,pp2[41/37],tp8,ep")
    rank = Rank(dp_rank=1, pp_rank=1, tp_rank=3)
    placement = topology.placement(glm, rank, is_dsa_cp=True)
    assert (placement.tp_size, placement.tp_rank) == (8, 3)
    assert (placement.ep_size, placement.ep_rank) == (16, 11)
    assert placement.layers(glm) == range(41, 78)
    assert placement.is_dsa_cp
    assert not placement.is_flashcomm
    alone = Topology.parse("dp2,ep")
    cuts = {"is_dsa_cp": True, "is_flashcomm": True}
    assert topology.placement(glm, rank, **cuts).is_flashcomm
    placement = alone.placement(glm, alone.coordinates(1), **cuts)
    assert not placement.is_dsa_cp
    assert not placement.is_flashcomm
    assert Topology.parse("dp2,pp2,tp8").placement(glm, rank).ep_size == 1


def test_a_stage_that_shares_the_last_ones_selection_is_told(glm: ModelConfig) -> None:
    assert "stage 1 starts at layer 41" in Topology.parse("pp2[41/37],tp16").notes(glm)[0]
    assert not Topology.parse("pp2[42/36],tp16").notes(glm)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp8,tp4", "'tp4'"),
        ("tp", "'tp'"),
        ("xp3", "'xp3'"),
        ("tp8[1/2]", r"'tp8\[1/2\]'"),
        ("tp0", "--tensor-parallel-size 0"),
        ("tp8,dcp4", "--decode-context-parallel-size 4 and --tensor-parallel-size 8"),
        ("pp3[41/37]", "--pp-layer-partition 41,37 has 2 stages, --pipeline-parallel-size is 3"),
        ("pp2[41/x]", r"'pp2\[41/x\]'"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Topology.parse(text)


@pytest.mark.parametrize("text", ["pp2[41/38]", "pp2[78/0]"])
def test_stages_must_add_up_to_the_models_layers(glm: ModelConfig, text: str) -> None:
    with pytest.raises(ConfigError, match="must add up to num_hidden_layers=78"):
        Topology.parse(text).stages(glm)


def test_more_stages_than_layers_are_refused(nano: ModelConfig) -> None:
    with pytest.raises(
        ConfigError, match="--pipeline-parallel-size 6 is above num_hidden_layers=5"
    ):
        Topology.parse("pp6").stages(nano)


def test_a_partition_is_read_as_the_environment_writes_it() -> None:
    assert read_partition("41,37") == (41, 37)
    with pytest.raises(ConfigError, match="--pp-layer-partition '41;37'"):
        read_partition("41;37")
