"""Bytes of weights against the published totals, and against a worker that has loaded some."""

import time

import pytest
import torch

from services.worker import ops
from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.parallel.topology import Rank, Topology
from services.worker.sizing.recipe import SchemeName, describe
from services.worker.sizing.weights import WeightBytes, WeightClass, weigh, weigh_rank
from shared.errors import CheckpointError, ConfigError
from tests.services.worker.sizing.conftest import MODELS


def spec_of(
    config: ModelConfig,
    placement: Placement | None = None,
    scheme: SchemeName = "bf16",
    *,
    has_mtp: bool = False,
    device: str = "meta",
    dtype: torch.dtype = torch.bfloat16,
) -> ModelSpec:
    return ModelSpec(
        config=config,
        dtype=dtype,
        device=torch.device(device),
        placement=placement or Placement(),
        quantization=describe(config, scheme),
        has_mtp=has_mtp,
    )


def test_the_whole_model_has_the_published_number_of_parameters(glm: ModelConfig) -> None:
    weights = weigh_rank(spec_of(glm, has_mtp=True))
    tables = 2 * glm.max_position_embeddings * 64 * 2
    assert weights[WeightClass.ROTARY] == tables
    # Everything is bfloat16 but routers, which are float32, on 75 layers and the MTP layer.
    routers = 256 * 6144 + 256
    parameters = (weights.total - tables - 76 * routers * 2) / 2
    # 753.33 billion with two decimals.
    assert parameters / 1e9 == pytest.approx(753.33, abs=0.005)


def test_the_mtp_layer_has_the_published_size(glm: ModelConfig) -> None:
    weights = weigh_rank(spec_of(glm, has_mtp=True))
    assert weights[WeightClass.MTP] / 1e9 == pytest.approx(19.9, abs=0.05)
    assert weigh_rank(spec_of(glm))[WeightClass.MTP] == 0


@pytest.mark.parametrize(("scheme", "gb"), [("bf16", 90.6), ("w8a8", 45.3), ("w4a8c8", 22.6)])
def test_experts_of_one_die_of_sixteen(glm: ModelConfig, scheme: SchemeName, gb: float) -> None:
    placement = Placement(tp_size=8, ep_size=16)
    experts = weigh_rank(spec_of(glm, placement, scheme))[WeightClass.EXPERTS]
    # The documented sizes are of the matrices alone. Scales: an int64 and a float32 for each of
    # 10,240 outputs of an int4 expert, a float32 in int8.
    per_output = {"bf16": 0, "w8a8": 4, "w4a8c8": 12}[scheme]
    scales = 75 * 16 * (2 * 2048 + 6144) * per_output
    assert (experts - scales) / 1e9 == pytest.approx(gb, abs=0.06)


def test_attention_is_cut_by_heads_or_whole_where_tokens_are(glm: ModelConfig) -> None:
    by_heads = weigh_rank(spec_of(glm, Placement(tp_size=8)))
    by_tokens = weigh_rank(spec_of(glm, Placement(tp_size=8, is_dsa_cp=True)))
    absorbed = 78 * 64 * (192 + 256) * 512 * 2
    assert by_tokens[WeightClass.ABSORBED] == absorbed == 8 * by_heads[WeightClass.ABSORBED]
    q_b = 78 * 64 * 256 * 2048 * 2
    grown = by_tokens[WeightClass.ATTENTION] - by_heads[WeightClass.ATTENTION]
    assert grown == q_b - q_b // 8


def test_stages_hold_their_layers_and_the_ends_of_the_model(glm: ModelConfig) -> None:
    topology = Topology.parse("pp2[41/37],tp16,ep")
    first, last = (
        weigh_rank(spec_of(glm, topology.placement(glm, Rank(dp_rank=0, pp_rank=stage, tp_rank=0))))
        for stage in (0, 1)
    )
    whole = weigh_rank(
        spec_of(
            glm, Topology.parse("tp16,ep").placement(glm, Rank(dp_rank=0, pp_rank=0, tp_rank=0))
        )
    )
    for kind in WeightClass:
        if kind is not WeightClass.ROTARY:
            assert first[kind] + last[kind] == whole[kind], kind
    table = 154880 // 16 * 6144 * 2
    assert first[WeightClass.EMBEDDINGS] == last[WeightClass.EMBEDDINGS] == table


def test_ranks_differ_only_where_experts_do_not_divide(glm: ModelConfig) -> None:
    def of(ep_rank: int) -> WeightBytes:
        return weigh_rank(spec_of(glm, Placement(tp_size=1, ep_size=48, ep_rank=ep_rank)))

    # 256 = 48 x 5 + 16: one more expert on the first 16 ranks.
    assert of(0).total == of(15).total > of(16).total == of(47).total
    expert = 75 * 3 * 6144 * 2048 * 2
    assert of(0).total - of(47).total == expert


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_mtp", [False, True])
def test_a_plan_counts_what_a_worker_holds_after_loading(
    nano: ModelConfig, dtype: torch.dtype, has_mtp: bool
) -> None:
    spec = spec_of(nano, has_mtp=has_mtp, device="cpu", dtype=dtype)
    loaded = weigh(load_model(MODELS / "glm-nano", spec))
    assert weigh_rank(spec) == loaded
    assert loaded.total > 0


@pytest.mark.parametrize("scheme", ["bf16", "w8a8c8", "w4a8c8"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_plan_counts_quantized_weights_as_a_rank_holds_them(
    nano: ModelConfig, scheme: SchemeName, tp_size: int
) -> None:
    ops.register()
    placement = Placement(tp_size=tp_size)
    spec = spec_of(nano, placement, scheme, has_mtp=True, device="cpu")
    decoder = Decoder.build(spec)
    types = {"I8": torch.int8, "I32": torch.int32, "BF16": torch.bfloat16}
    for slot in decoder.slots():
        # Ones, so that scales are scales; zero points must be zero.
        fill = torch.zeros if slot.name.endswith("offset") else torch.ones
        slot.store(fill(slot.kept_shape, dtype=types[min(slot.types)]))
    decoder.finish_loading()
    assert weigh_rank(spec) == weigh(decoder)


def test_a_part_that_no_rank_could_load_is_refused(glm: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="not whole sixteenths"):
        weigh_rank(spec_of(glm, Placement(tp_size=32), "w4a8c8"))
    with pytest.raises(ConfigError, match="num_attention_heads=64 cannot be cut over tp_size=3"):
        weigh_rank(spec_of(glm, Placement(tp_size=3)))


def test_a_rank_is_weighed_in_a_fraction_of_a_second(glm: ModelConfig) -> None:
    spec = spec_of(glm, Placement(tp_size=8, ep_size=16), "w4a8c8", has_mtp=True)
    started = time.process_time()
    weigh_rank(spec)
    # 0.04 s; a plan with all its suggestions weighs about a hundred.
    assert time.process_time() - started < 1
