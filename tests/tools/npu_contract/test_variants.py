"""The variants cover what they say: each pair of weights, place and caches of a model."""

import itertools

import pytest
import torch

from services.worker.model.placement import Placement
from services.worker.parallel.moe_method import MoeMethod
from services.worker.quant.scheme import Scheme
from tools.npu_contract.variants import FAULT_VARIANTS, VARIANTS, Variant

WEIGHTS = ("bf16", "w8a8", "w8a8 dynamic", "w4a8")
CACHES = ("bf16", "LI C8", "SFA C8", "C8")
PLACES = ("whole", "TP8", "TP16", "TP8 EP16", "TP8 EP16, MC2", "DSA-CP8", "EP24")


def of(model: str) -> list[Variant]:
    return [variant for variant in VARIANTS.values() if variant.model == model]


def test_full_size_variants_cover_all_pairs() -> None:
    full = of("glm-5.2")
    pairs = {(v.weights, v.place) for v in full}
    assert set(itertools.product(WEIGHTS, PLACES)) <= pairs
    assert set(itertools.product(WEIGHTS, CACHES)) <= {(v.weights, v.caches) for v in full}
    assert set(itertools.product(PLACES, CACHES)) <= {(v.place, v.caches) for v in full}
    assert {v.weight_nz_mode for v in full} == {0, 1}


def test_nano_has_all_weights_and_caches_whole_and_in_parts() -> None:
    nano = of("glm-nano")
    assert set(itertools.product(WEIGHTS, CACHES)) <= {(v.weights, v.caches) for v in nano}
    assert {v.place for v in nano} == {"whole", "TP2", "TP2 EP4", "EP3"}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=str)
def test_a_variant_is_a_possible_rank(variant: Variant) -> None:
    spec = variant.spec
    spec.placement.check(spec.config)
    assert (spec.dtype, spec.device.type) == (torch.bfloat16, "meta")
    assert spec.groups.tp.size == spec.placement.tp_size
    assert spec.groups.ep.size == spec.groups.tp.size * spec.groups.dp.size or (
        spec.placement.ep_size == 1
    )


def test_experts_that_do_not_divide_are_among_them() -> None:
    shares = {len(v.spec.placement.experts(256)) for v in of("glm-5.2")}
    assert shares >= {256, 16, 11}


def test_all_ways_to_experts_are_among_them() -> None:
    sent = {v.method for v in VARIANTS.values() if v.spec.placement.ep_size > 1}
    assert sent == set(MoeMethod)


def test_dynamic_weights_have_a_scale_per_row_everywhere() -> None:
    found = Variant(model="glm-5.2", weights="w8a8 dynamic").spec.quantization.types.values()
    assert set(found) == {Scheme.FLOAT, Scheme.W8A8_DYNAMIC}
    static = Variant(model="glm-5.2", weights="w8a8").spec.quantization.types.values()
    assert set(static) == {Scheme.FLOAT, Scheme.W8A8, Scheme.W8A8_DYNAMIC}


def test_faults_are_planted_in_models_of_few_layers() -> None:
    assert {v.model for v in FAULT_VARIANTS} == {"two layers"}
    assert FAULT_VARIANTS[0].spec.placement == Placement()
