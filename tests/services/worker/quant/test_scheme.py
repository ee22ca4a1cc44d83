"""How a checkpoint says that its weights are stored."""

import json
from collections.abc import ItemsView, Iterator
from pathlib import Path

import pytest

from services.worker.model.cache_format import CacheFormat
from services.worker.quant.description import SERVED
from services.worker.quant.scheme import DESCRIPTION_FILE, QuantDescription, Scheme
from shared.errors import CheckpointError

ATTENTION = "model.layers.0.self_attn."


def describe(**types: str) -> QuantDescription:
    values = {f"{ATTENTION}{name}.weight": kind for name, kind in types.items()}
    return QuantDescription.from_dict(values, source="d.json")


def test_without_a_description_every_weight_is_float(tmp_path: Path) -> None:
    description = QuantDescription.from_dir(tmp_path)
    assert not description.is_quantized
    assert description.scheme(ATTENTION, ("o_proj",)) is Scheme.FLOAT


def test_layers_of_one_product_agree() -> None:
    description = describe(q_a_proj="W8A8", kv_a_proj_with_mqa="W8A8", o_proj="W8A8_DYNAMIC")
    assert description.scheme(ATTENTION, ("q_a_proj", "kv_a_proj_with_mqa")) is Scheme.W8A8
    with pytest.raises(CheckpointError, match=r"q_a_proj is W8A8, o_proj is W8A8_DYNAMIC"):
        description.scheme(ATTENTION, ("q_a_proj", "o_proj"))


def test_a_layer_without_entry_is_named() -> None:
    description = describe(o_proj="W8A8")
    with pytest.raises(CheckpointError, match=r"d\.json: .*q_b_proj\.weight: has no entry"):
        description.scheme(ATTENTION, ("q_b_proj",))


def test_a_type_that_is_not_served_is_refused_when_the_description_is_read() -> None:
    with pytest.raises(CheckpointError, match=r"o_proj\.weight: type W4A4_DYNAMIC is not served"):
        describe(o_proj="W4A4_DYNAMIC")


def test_the_served_types_are_the_schemes() -> None:
    assert frozenset(scheme.value for scheme in Scheme) == SERVED


def test_faults_name_the_description(tmp_path: Path) -> None:
    description = describe(o_proj="W8A8")
    (fault,) = description.find_faults(set())
    assert fault.startswith(f"d.json: {ATTENTION}o_proj.weight: has an entry")
    assert not list(QuantDescription.from_dir(tmp_path).find_faults({"a.weight"}))


def test_a_packed_weight_stands_for_the_weight() -> None:
    values = {f"{ATTENTION}o_proj.weight_packed": "W8A8_DYNAMIC"}
    description = QuantDescription.from_dict(values, source="d.json")
    assert description.scheme(ATTENTION, ("o_proj",)) is Scheme.W8A8_DYNAMIC


def test_a_shared_head_is_found_without_its_prefix() -> None:
    values = {"model.layers.5.shared_head.head.weight": "FLOAT"}
    description = QuantDescription.from_dict(values, source="d.json")
    assert description.scheme("model.layers.5.", ("head",)) is Scheme.FLOAT


@pytest.mark.parametrize("text", ["{", "[]", "1", '{"a.weight": "FLOAT", "a.weight": "W8A8"}'])
def test_a_broken_description_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / DESCRIPTION_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=DESCRIPTION_FILE):
        QuantDescription.from_dir(tmp_path)


def test_a_description_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    values = {"version": "1.0.0", "group_size": 0, f"{ATTENTION}o_proj.weight": "W8A8"}
    (tmp_path / DESCRIPTION_FILE).write_text(json.dumps(values))
    assert QuantDescription.from_dir(tmp_path).scheme(ATTENTION, ("o_proj",)) is Scheme.W8A8


def test_the_names_are_looked_through_once_however_many_layers_ask() -> None:
    """A checkpoint has 240,000 of them, and 22 layers with keys."""

    class Counted(dict[str, str]):
        passes = 0

        def items(self) -> ItemsView[str, str]:
            self.passes += 1
            return super().items()

        def __iter__(self) -> Iterator[str]:
            self.passes += 1
            return super().__iter__()

    types = Counted({"model.layers.3.self_attn.indexer.quant_type": "INT8_DYNAMIC"})
    description = QuantDescription(source="d.json", types=types)
    cache = CacheFormat(sparse_li_c8=True)
    found = [cache.has_c8_keys(layer, description.key_layers) for layer in range(22)]
    assert found == [layer == 3 for layer in range(22)]
    assert types.passes == 1
