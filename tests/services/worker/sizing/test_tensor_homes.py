"""Every tensor of the published checkpoint has its place in every deployment of the guide.

All ranks of a replica world are built without storage. What they read of a tensor must be all of
it: once where it is divided, and whole on each rank where it is meant to be copied.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.parallel.topology import Rank, Topology
from services.worker.quant.scheme import QuantDescription
from services.worker.sizing.recipe import SchemeName, describe
from tests.services.worker.sizing import published

Slots = dict[str, WeightSlot]
Window = tuple[tuple[int, int], ...]


def slots_of(
    config: ModelConfig,
    topology: Topology,
    rank: Rank,
    quantization: QuantDescription,
    *,
    is_dsa_cp: bool = False,
) -> Slots:
    spec = ModelSpec(
        config=config,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        placement=topology.placement(config, rank, is_dsa_cp=is_dsa_cp),
        quantization=quantization,
        has_mtp=True,
    )
    found = [slot for slot in Decoder.build(spec).slots() if slot.is_required]
    assert len({slot.name for slot in found}) == len(found), "a tensor has two places on one rank"
    return {slot.name: slot for slot in found}


def window_of(slot: WeightSlot) -> Window:
    if slot.window is None:
        return tuple((0, size) for size in slot.shape)
    return tuple((part.start, part.stop) for part in slot.window)


def check_tiles(name: str, shape: tuple[int, ...], axis: int | None, windows: list[Window]) -> None:
    """Windows are all of the tensor, or lie side by side along the axis and fill it."""
    whole = tuple((0, size) for size in shape)
    if axis is None:
        assert set(windows) == {whole}, name
        return
    parts = sorted({window[axis] for window in windows} - {(shape[axis], shape[axis])})
    assert parts[0][0] == 0, name
    assert parts[-1][1] == shape[axis], name
    for (_, stop), (start, _) in pairwise(parts):
        assert stop == start, f"{name}: rows {stop} to {start} are missing or read twice"
    for window in windows:
        others = [part for at, part in enumerate(window) if at != axis]
        assert others == [part for at, part in enumerate(whole) if at != axis], name


def check_world(config: ModelConfig, topology: Topology, *, is_dsa_cp: bool = False) -> None:
    """Compare all ranks of one world with the published list."""
    read: dict[str, list[tuple[Rank, WeightSlot]]] = {}
    for number in range(topology.world_size):
        rank = topology.coordinates(number)
        slots = slots_of(config, topology, rank, QuantDescription(), is_dsa_cp=is_dsa_cp)
        for name, slot in slots.items():
            read.setdefault(name, []).append((rank, slot))
    expected = list(expected_tensors(config))
    embeddings = "model.embed_tokens.weight"
    assert read.keys() == {name for name, _, _ in expected}
    for name, shape, axis in expected:
        found = read[name]
        assert {slot.shape for _, slot in found} == {shape}, name
        # Embeddings are on the first stage, and where the MTP layer needs them.
        stages = {rank.pp_rank for rank, _ in found}
        assert len(stages) == 1 or name == embeddings, name
        is_spread = topology.enable_expert_parallel and ".experts." in name
        is_copied = is_spread or (
            is_dsa_cp and name.endswith(("q_b_proj.weight", "kv_b_proj.weight"))
        )
        check_tiles(name, shape, None if is_copied else axis, [window_of(s) for _, s in found])
        if is_spread:
            assert len(found) == 1, f"{name} is on {len(found)} ranks"
        else:
            ranks = topology.data_parallel_size * topology.tensor_parallel_size
            assert len(found) == ranks * len(stages), name


def expected_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """The published list, or its part of a model that was cut to its first layers."""
    if config.num_hidden_layers == published.LAYERS:
        yield from published.tensors(layers=range(published.LAYERS), with_mtp=True)
        return
    last = published.LAYERS
    layers = config.num_hidden_layers
    yield from published.tensors(layers=range(layers), with_mtp=False)
    tail = published.tensors(layers=range(last - 1, last), with_mtp=True)
    for name, shape, axis in tail:
        if not name.startswith(f"model.layers.{last - 1}."):
            yield name.replace(f"layers.{last}.", f"layers.{layers}."), shape, axis


@pytest.fixture(scope="module")
def cut(glm: ModelConfig) -> ModelConfig:
    """The first 8 layers and the MTP layer: every kind of layer, a tenth of the time."""
    return replace(
        glm,
        num_hidden_layers=8,
        indexer_types=glm.indexer_types[:8],
        mlp_layer_types=glm.mlp_layer_types[:8],
    )


@pytest.mark.parametrize(
    ("text", "is_dsa_cp"),
    [
        ("tp8,ep", False),
        ("dp2,tp8,ep", True),
        ("tp16,dcp16,ep", True),
        ("pp2[41/37],tp16,ep", True),
    ],
)
def test_every_published_tensor_has_its_place(glm: ModelConfig, text: str, is_dsa_cp: bool) -> None:
    check_world(glm, Topology.parse(text), is_dsa_cp=is_dsa_cp)


@pytest.mark.parametrize(
    ("text", "is_dsa_cp"),
    [
        ("tp16", False),
        ("dp4,tp8,ep", False),
        ("dp16,tp2,ep", False),
        ("dp8,tp4,ep", False),
        ("dp2,tp16,dcp16,ep", True),
        ("dp2,tp4", True),
        ("pp2[6/2],tp2,ep", False),
        ("pp4,tp2", False),
    ],
)
def test_the_other_layouts_place_every_kind_of_tensor(
    cut: ModelConfig, text: str, is_dsa_cp: bool
) -> None:
    check_world(cut, Topology.parse(text), is_dsa_cp=is_dsa_cp)


def test_a_rank_reads_its_part_of_each_expert_where_experts_are_cut(glm: ModelConfig) -> None:
    topology = Topology.parse("tp16")
    names = {name for name, _, _ in expected_tensors(glm)}
    for tp_rank in (0, 15):
        rank = Rank(dp_rank=0, pp_rank=0, tp_rank=tp_rank)
        slots = slots_of(glm, topology, rank, QuantDescription())
        assert slots.keys() == names
        down = window_of(slots["model.layers.77.mlp.experts.255.down_proj.weight"])
        assert down == ((0, 6144), (tp_rank * 128, tp_rank * 128 + 128))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8c8"])
@pytest.mark.parametrize("text", ["dp2,tp8,ep", "tp16", "pp2[6/2],tp16,ep"])
def test_quantized_layouts_have_a_place_for_every_weight(
    cut: ModelConfig, scheme: SchemeName, text: str
) -> None:
    topology, quantization = Topology.parse(text), describe(cut, scheme)
    names: set[str] = set()
    # Where experts are cut every rank reads all names: the first and the last are enough.
    step = 1 if topology.enable_expert_parallel else topology.world_size - 1
    for number in range(0, topology.world_size, step):
        rank = topology.coordinates(number)
        names |= slots_of(cut, topology, rank, quantization).keys()
    wanted = {name for name, _, _ in expected_tensors(cut)}
    assert not wanted - names
    # Beside the weights: scales, and what a rotated checkpoint adds for the MTP layer.
    kinds = {name.rpartition(".")[2] for name in names - wanted}
    scales = {"weight_scale"}
    scales |= {"scale_bias"} if scheme == "w4a8c8" else set()
    static = {"deq_scale", "quant_bias", "input_scale", "input_offset"}
    assert kinds == {"weight"} | scales | (static if scheme == "w8a8" else set())
    extra = {name for name in names - wanted if name.endswith(".weight")}
    assert extra == {"rot.weight", "model.layers.8.shared_head.head.weight"}
