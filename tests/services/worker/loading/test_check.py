"""The whole checkpoint is held against the whole model, whichever part a rank keeps."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.loading.check import check_entries
from services.worker.loading.files import WeightFile
from services.worker.loading.header import TensorEntry
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.mtp import MTPLayer
from services.worker.model.placement import Placement
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

FILE = WeightFile(path=Path("/c/part-1"), num_bytes=0, inode=(0, 0), modified_ns=0)
EXPERT = "model.layers.2.mlp.experts.7.down_proj.weight"

RANKS = [
    Placement(),
    Placement(tp_size=4, tp_rank=3),
    Placement(tp_size=2, ep_size=4, ep_rank=1),
    Placement(first_layer=0, last_layer=2),
    Placement(first_layer=2),
]


@pytest.fixture
def spec(tiny_values: dict[str, Any]) -> ModelSpec:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    return ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"))


def entries_of(slots: Iterable[WeightSlot]) -> dict[str, TensorEntry]:
    return {
        slot.name: TensorEntry(
            name=slot.name, file=FILE, type_name="BF16", shape=slot.shape, offset=0, num_bytes=0
        )
        for slot in slots
    }


@pytest.fixture
def entries(spec: ModelSpec) -> dict[str, TensorEntry]:
    return entries_of(Decoder.build(spec).slots())


def check(spec: ModelSpec, placement: Placement, entries: dict[str, TensorEntry]) -> None:
    check_entries(Path("/c"), entries, replace(spec, placement=placement))


@pytest.mark.parametrize("placement", RANKS)
def test_a_whole_checkpoint_suits_every_rank(
    spec: ModelSpec, entries: dict[str, TensorEntry], placement: Placement
) -> None:
    check(spec, placement, entries)
    check(spec, placement, entries | entries_of(MTPLayer(spec).slots()))


@pytest.mark.parametrize("placement", RANKS)
def test_every_rank_tells_the_same_faults(
    spec: ModelSpec, entries: dict[str, TensorEntry], placement: Placement
) -> None:
    del entries[EXPERT]
    norm = entries["model.norm.weight"]
    entries["model.norm.weight"] = replace(norm, shape=(63,), type_name="I8")
    entries["model.layers.9.x"] = replace(norm, name="model.layers.9.x")
    with pytest.raises(CheckpointError) as caught:
        check(spec, placement, entries)
    assert str(caught.value).splitlines() == [
        f"/c: {EXPERT}: is missing",
        "/c/part-1: model.layers.9.x: is not part of this model",
        "/c/part-1: model.norm.weight: has shape [63], must be [64]",
        "/c/part-1: model.norm.weight: has type I8, must be one of BF16, F16, F32",
    ]


def test_a_part_of_an_mtp_layer_is_told_apart(
    spec: ModelSpec, entries: dict[str, TensorEntry]
) -> None:
    layer = entries_of(MTPLayer(spec).slots())
    del layer["model.layers.4.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"/c: model\.layers\.4\.eh_proj\.weight: is missing"):
        check(spec, Placement(), entries | layer)


def test_copies_of_embeddings_and_head_in_the_mtp_layer_are_optional(
    spec: ModelSpec, entries: dict[str, TensorEntry]
) -> None:
    required = [slot for slot in MTPLayer(spec).slots() if slot.is_required]
    optional = [slot for slot in MTPLayer(spec).slots() if not slot.is_required]
    assert optional
    check(spec, Placement(), entries | entries_of(required))
    check(spec, Placement(), entries | entries_of([*required, *optional]))
