"""What a description may say, and how it must agree with itself and with the files."""

from typing import Any

import pytest

from services.worker.quant.description import find_faults, key_layers, read_types
from shared.errors import CheckpointError

ATTENTION = "model.layers.0.self_attn."
EXPERTS = "model.layers.3.mlp.experts."
INT4: dict[str, Any] = {
    "version": "1.0.0",
    "group_size": 0,
    f"{EXPERTS}0.up_proj.weight": "W4A8_DYNAMIC",
}


def test_keys_of_the_whole_checkpoint_are_no_tensors() -> None:
    values = {"model_quant_type": "W8A8", "version": "1.0.0", "metadata": {}, "optional": {}}
    types = read_types({**values, "model.norm.weight": "FLOAT"}, "d.json")
    assert dict(types) == {"model.norm.weight": "FLOAT"}


@pytest.mark.parametrize("kind", ["W8A16", "W8A8_MXFP8", "WFP8AFP8_DYNAMIC", "C8", "FAQuant"])
def test_a_type_of_another_kind_of_kernel_is_named(kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"d\.json: a\.weight: type {kind} is not served"):
        read_types({"a.weight": kind}, "d.json")


def test_an_unknown_type_is_told_from_one_that_is_not_served() -> None:
    with pytest.raises(CheckpointError, match=r"a\.weight: unknown type W8A9 .*W8A8_DYNAMIC"):
        read_types({"a.weight": "W8A9"}, "d.json")


@pytest.mark.parametrize("kind", [None, 8, ["W8A8"]])
def test_a_type_that_is_no_text_is_named(kind: object) -> None:
    with pytest.raises(CheckpointError, match=r"d\.json: a\.weight: has .* for a type"):
        read_types({"a.weight": kind}, "d.json")


@pytest.mark.parametrize("key", ["kv_quant_type", "kv_cache_type", "fa_quant_type"])
def test_caches_of_formats_that_are_not_built_are_refused_by_key(key: str) -> None:
    assert read_types({key: None}, "d.json") == {}
    with pytest.raises(CheckpointError, match=rf"d\.json: {key} is 'C8', which is not served"):
        read_types({key: "C8"}, "d.json")


def test_int4_weights_of_the_current_layout_are_served() -> None:
    assert len(read_types(INT4, "d.json")) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": None}, "version is None: int4 weights of the layout before"),
        ({"version": "0.9"}, "version is '0.9': int4"),
        ({"group_size": 256}, "group_size is 256: int4 weights with a scale per group"),
        (
            {f"{EXPERTS}0.up_proj.weight_scale_second": "W4A8_DYNAMIC"},
            "has .*weight_scale_second: int4",
        ),
    ],
)
def test_int4_weights_of_another_layout_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"d\.json: {message}"):
        read_types(INT4 | change, "d.json")


def test_a_version_is_not_asked_of_int8_weights() -> None:
    assert read_types({f"{ATTENTION}o_proj.weight": "W8A8", "group_size": 128}, "d.json")


def test_every_tensor_needs_an_entry_and_every_entry_a_tensor() -> None:
    types = read_types({"a.weight": "FLOAT", "b.weight": "FLOAT"}, "d.json")
    assert list(find_faults(types, {"b.weight", "c.weight"})) == [
        "c.weight: is in the checkpoint and has no entry",
        "a.weight: has an entry and is in no file",
    ]
    assert not list(find_faults(types, {"a.weight", "b.weight"}))


def test_rotations_may_be_described_or_not() -> None:
    described = {"rot.weight": "FLOAT", f"{ATTENTION}indexer.q_rot": "INT8_DYNAMIC"}
    assert not list(find_faults(read_types(described, "d.json"), set()))
    assert not list(find_faults({}, set(described)))


@pytest.mark.parametrize("entry", ["quant_type", "wq_b_weight"])
def test_an_entry_about_indexer_keys_needs_an_indexer(entry: str) -> None:
    wq_b = f"{ATTENTION}indexer.wq_b.weight"
    values = {f"{ATTENTION}indexer.{entry}": "INT8_DYNAMIC", wq_b: "W8A8"}
    assert not list(find_faults(read_types(values, "d.json"), {wq_b}))
    del values[wq_b]
    (fault,) = find_faults(read_types(values, "d.json"), set())
    assert fault == f"{ATTENTION}indexer.{entry}: has an entry, and the layer has no indexer"


def test_the_tensors_of_one_matrix_have_one_type() -> None:
    values = {f"{ATTENTION}o_proj.{leaf}": "W8A8" for leaf in ("weight", "deq_scale")}
    assert not list(find_faults(read_types(values, "d.json"), set(values)))
    values[f"{ATTENTION}o_proj.input_scale"] = "FLOAT"
    (fault,) = find_faults(read_types(values, "d.json"), set(values))
    assert fault == f"{ATTENTION}o_proj.input_scale: is FLOAT, and its weight is W8A8"


def test_a_float_bias_beside_a_quantized_weight_is_no_fault() -> None:
    values = {f"{ATTENTION}o_proj.weight": "W8A8", f"{ATTENTION}o_proj.bias": "FLOAT"}
    assert not list(find_faults(read_types(values, "d.json"), set(values)))


def test_the_experts_of_a_layer_have_one_type() -> None:
    names = [f"{EXPERTS}{e}.{part}_proj.weight" for e in (0, 1) for part in ("gate", "down")]
    values = dict.fromkeys(names, "W8A8_DYNAMIC")
    assert not list(find_faults(read_types(values, "d.json"), set(values)))
    values[names[3]] = "FLOAT"
    (fault,) = find_faults(read_types(values, "d.json"), set(values))
    assert fault == f"{names[3]}: is FLOAT, and {names[0]} is W8A8_DYNAMIC"


def test_experts_of_different_layers_may_differ() -> None:
    values = {f"model.layers.{i}.mlp.experts.0.up_proj.weight": k for i, k in enumerate("ab")}
    assert not list(find_faults(values, set(values)))


@pytest.mark.parametrize("entry", ["quant_type", "wq_b_weight"])
@pytest.mark.parametrize(
    ("kind", "is_eight"),
    [
        ("INT8_DYNAMIC", True),
        ("QK_INT8_DYNAMIC", True),
        ("W8A8_MXFP8", True),
        ("FLOAT", False),
        ("W8A8_DYNAMIC", False),
    ],
)
def test_the_values_of_entries_about_keys_tell_the_layers(
    entry: str, kind: str, is_eight: bool
) -> None:
    prefix = "model.layers.33.self_attn.indexer"
    assert key_layers({f"{prefix}.{entry}": kind}) == ({33} if is_eight else set())


def test_a_description_without_a_word_about_keys_names_no_layers() -> None:
    assert key_layers({}) is None
    assert key_layers({"model.layers.3.self_attn.indexer.wq_b.weight": "W8A8"}) is None
    assert key_layers({"indexer_quant_type": "INT8_DYNAMIC"}) is None
