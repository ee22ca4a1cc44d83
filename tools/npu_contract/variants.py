"""Forms of a model that the contract test drives: weights, caches, a rank's place among others.

Each form of the weights meets each place and each format of the caches at least once; all three
together would be four times as many runs and meet the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.placement import WHOLE, Placement
from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod
from services.worker.quant.description import KEY_TYPE
from services.worker.quant.scheme import QuantDescription, Scheme
from services.worker.sizing.recipe import SchemeName, describe
from tools.npu_contract.cases import model_configs
from tools.npu_contract.ranks import make_groups

Weights = Literal["bf16", "w8a8", "w8a8 dynamic", "w4a8"]

_RECIPES: Mapping[Weights, SchemeName] = MappingProxyType(
    {"bf16": "bf16", "w8a8": "w8a8", "w8a8 dynamic": "w8a8", "w4a8": "w4a8c8"}
)
_IN_PART = "LI C8 in layer 1"
_CACHES: Mapping[str, CacheFormat] = MappingProxyType(
    {
        # As a description asks for that names layers.
        _IN_PART: CacheFormat(sparse_li_c8=True),
        "bf16": CacheFormat(),
        "LI C8": CacheFormat(sparse_li_c8=True),
        "SFA C8": CacheFormat(sparse_sfa_c8=True),
        "C8": CacheFormat(sparse_li_c8=True, sparse_sfa_c8=True),
        "bf16 of A2": CacheFormat(generation="a2"),
        "C8 of A5": CacheFormat(sparse_li_c8=True, sparse_sfa_c8=True, generation="a5"),
    }
)
_A3_CACHES = ("bf16", "LI C8", "SFA C8", "C8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place, and how it reaches experts on other ranks."""

    placement: Placement = WHOLE
    method: MoeMethod = MoeMethod.ALLGATHER
    num_stages: int = 1


_TP8_EP16 = Placement(tp_size=8, tp_rank=1, ep_size=16, ep_rank=9)
_CUT_EP16 = replace(_TP8_EP16, is_dsa_cp=True, is_flashcomm=True)
_PLACES: Mapping[str, Place] = MappingProxyType(
    {
        "whole": Place(),
        "TP2": Place(placement=Placement(tp_size=2, tp_rank=1)),
        "TP2 EP4": Place(
            placement=Placement(tp_size=2, tp_rank=1, ep_size=4, ep_rank=3),
            method=MoeMethod.ALLTOALL,
        ),
        # 8 experts: 3, 3 and 2
        "EP3": Place(placement=Placement(ep_size=3, ep_rank=2)),
        "TP8": Place(placement=Placement(tp_size=8, tp_rank=3)),
        "TP16": Place(placement=Placement(tp_size=16, tp_rank=15)),
        "TP8 EP16": Place(placement=_TP8_EP16),
        "TP8 EP16, MC2": Place(placement=_TP8_EP16, method=MoeMethod.MC2),
        "DSA-CP8": Place(placement=Placement(tp_size=8, tp_rank=2, is_dsa_cp=True)),
        "FlashComm8": Place(placement=Placement(tp_size=8, tp_rank=3, is_flashcomm=True)),
        # As the published prefill nodes are.
        "DSA-CP8 FlashComm EP16": Place(placement=_CUT_EP16, method=MoeMethod.ALLTOALL),
        "FlashComm8 EP16": Place(placement=replace(_CUT_EP16, is_dsa_cp=False)),
        "DSA-CP8 FlashComm EP16, MC2": Place(placement=_CUT_EP16, method=MoeMethod.MC2),
        # 256 experts: 11 on the first 16, then 10
        "EP24": Place(placement=Placement(ep_size=24, ep_rank=3), method=MoeMethod.ALLTOALL),
        "first of PP2": Place(placement=Placement(last_layer=4), num_stages=2),
        # Begins with a layer that shares the selection of the stage before.
        "last of PP2": Place(placement=Placement(first_layer=4), num_stages=2),
    }
)
_MODEL_PLACES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "glm-nano": ("whole", "TP2", "TP2 EP4", "EP3"),
        "glm-5.2": (
            "whole",
            "TP8",
            "TP16",
            "TP8 EP16",
            "TP8 EP16, MC2",
            "DSA-CP8",
            "FlashComm8",
            "EP24",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One form of one model."""

    model: str
    weights: Weights = "bf16"
    caches: str = "bf16"
    place: str = "whole"
    weight_nz_mode: int = 1

    def __str__(self) -> str:
        layout = "" if self.weight_nz_mode else ", plain layout"
        return f"{self.model}, {self.weights} weights, {self.caches} caches, {self.place}{layout}"

    @property
    def method(self) -> MoeMethod:
        """How its steps reach experts on other ranks."""
        return _PLACES[self.place].method

    @property
    def spec(self) -> ModelSpec:
        """What it is built from, without memory, in bfloat16, with the MTP layer if it has one."""
        config, place = model_configs()[self.model], _PLACES[self.place]
        return ModelSpec(
            config=config,
            dtype=torch.bfloat16,
            device=torch.device("meta"),
            placement=place.placement,
            groups=make_groups(place.placement, place.num_stages),
            quantization=_describe(config, self.weights, self.caches),
            cache=_CACHES[self.caches],
            has_mtp=config.num_nextn_predict_layers > 0,
            weight_nz_mode=self.weight_nz_mode,
        )


def _describe(config: ModelConfig, weights: Weights, caches: str) -> QuantDescription:
    found = describe(config, _RECIPES[weights])
    types = dict(found.types)
    if weights == "w8a8 dynamic":
        dynamic = {Scheme.W8A8.value: Scheme.W8A8_DYNAMIC.value}
        types = {name: dynamic.get(kind, kind) for name, kind in types.items()}
    if caches == _IN_PART:
        types["model.layers.1.self_attn.indexer.quant_type"] = KEY_TYPE
    return replace(found, types=types)


def _cover() -> Iterator[Variant]:
    """All pairs of weights, caches and places of each model that a device takes."""
    for model, places in _MODEL_PLACES.items():
        for row, place in enumerate(places):
            for column, weights in enumerate(_RECIPES):
                caches = _A3_CACHES[(row + column) % len(_A3_CACHES)]
                # A half of nano's experts is 32 wide: less than int4 weights come in.
                if (model, weights, place) != ("glm-nano", "w4a8", "TP2"):
                    yield Variant(model=model, weights=weights, caches=caches, place=place)


def _others() -> Iterator[Variant]:
    """What differs on other devices, in other layouts, and between stages."""
    weights: Weights
    yield Variant(model="benchmark")
    cuts = [place for place in _PLACES if "FlashComm" in place and "EP" in place]
    for weights, place, caches in zip(
        ("w8a8", "w8a8 dynamic", "bf16"), cuts, ("LI C8", "C8", "bf16"), strict=True
    ):
        yield Variant(model="glm-5.2", weights=weights, caches=caches, place=place)
    yield Variant(model="glm-nano", weights="w4a8")
    for weights in _RECIPES:
        yield Variant(model="glm-5.2", weights=weights, caches="C8", place="TP8", weight_nz_mode=0)
    yield Variant(model="glm-5.2", caches="C8 of A5", place="TP8")
    yield Variant(model="glm-5.2", weights="w8a8", caches="C8 of A5")
    yield Variant(model="glm-5.2", weights="w8a8", caches=_IN_PART, place="TP8")
    for weights in ("bf16", "w8a8"):
        # An A2 sends the experts' weights along with the tokens.
        yield Variant(model="glm-5.2", weights=weights, caches="bf16 of A2", place="TP8 EP16, MC2")
        for place in ("first of PP2", "last of PP2"):
            yield Variant(model="glm-5.2", weights=weights, place=place)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {str(variant): variant for variant in (*_cover(), *_others())}
)


FAULT_VARIANTS: tuple[Variant, ...] = (
    Variant(model="two layers"),
    Variant(model="two layers", weights="w8a8", caches="C8", place="TP8"),
    Variant(model="two layers", weights="w8a8 dynamic", caches="C8 of A5", weight_nz_mode=0),
    Variant(model="two layers", weights="w4a8", caches="LI C8", place="TP8 EP16"),
    Variant(model="two layers", weights="w4a8", weight_nz_mode=0),
    Variant(model="two layers", weights="w8a8", caches="bf16 of A2", place="TP8 EP16, MC2"),
    Variant(model="two layers", weights="w8a8", place="EP24"),
    Variant(model="two layers", place="DSA-CP8 FlashComm EP16"),
)
"""The fewest and smallest that together make every call of the model's source."""
