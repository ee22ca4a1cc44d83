"""Loading: every tensor lands where it belongs, and every fault is named."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.worker.loading.load import load_model
from services.worker.loading.progress import LoadProgress
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.mtp import MTPLayer
from services.worker.model.spec import ModelSpec
from services.worker.ops import nz
from shared.errors import CheckpointError

WEIGHT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def source(make_checkpoint: Callable[..., Any]) -> Any:
    return make_checkpoint()


@pytest.fixture
def tensors(source: Any) -> dict[str, torch.Tensor]:
    return load_file(source.path / "model.safetensors")


def spec_of(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> ModelSpec:
    config = ModelConfig.from_dict(values)
    return ModelSpec(config=config, dtype=dtype, device=torch.device("cpu"))


def load(
    path: Path,
    source: Any,
    tensors: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> Any:
    save_file(tensors, str(path / "model.safetensors"))
    return load_model(path, spec_of(source.values | changes, dtype))


def test_progress_counts_every_tensor_and_byte(source: Any) -> None:
    seen: list[LoadProgress] = []
    load_model(source.path, spec_of(source.values), progress=seen.append)
    assert [progress.num_tensors for progress in seen] == list(range(len(seen)))
    assert seen[-1].num_tensors == seen[-1].total_tensors
    assert seen[-1].num_bytes == seen[-1].total_bytes
    header = 200_000  # names and offsets
    assert 0 <= (source.path / "model.safetensors").stat().st_size - seen[-1].total_bytes < header


def test_the_router_stays_float32_in_a_bfloat16_model(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    decoder = load(tmp_path, source, tensors, dtype=torch.bfloat16)
    gate = decoder.layers[1].mlp.gate
    assert torch.equal(nz.plain(gate.weight).T, tensors["model.layers.1.mlp.gate.weight"])
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert decoder.layers[1].mlp.experts.w13.dtype == torch.bfloat16


def test_experts_and_fused_projections_land_in_their_places(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    decoder = load(tmp_path, source, tensors)
    moe, attention = decoder.layers[1].mlp, decoder.layers[0].self_attn
    assert torch.equal(nz.plain(moe.experts.w13)[3, :, 32:], tensors[WEIGHT].T)
    down = tensors[WEIGHT.replace("up_proj", "down_proj")]
    assert torch.equal(nz.plain(moe.experts.w2)[3], down.T)
    prefix = "model.layers.0.self_attn."
    kv_a = tensors[f"{prefix}kv_a_proj_with_mqa.weight"]
    assert torch.equal(nz.plain(attention.fused_qkv_a_proj.weight)[:, 48:].T, kv_a)
    kv_b = tensors[f"{prefix}kv_b_proj.weight"].view(4, 64, 512)
    assert torch.equal(nz.plain(attention.W_UK_T), kv_b[:, :32])
    assert torch.equal(nz.plain(attention.W_UV), kv_b[:, 32:].transpose(1, 2))


def test_an_index_of_several_files_is_followed(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, str(tmp_path / file))
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    spec = spec_of(source.values)
    decoder = load_model(tmp_path, spec)
    assert torch.equal(decoder.norm.weight, tensors["model.norm.weight"])

    index.write_text(json.dumps({"weight_map": weight_map | {names[0]: "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"b\.safetensors: {names[0]}"):
        load_model(tmp_path, spec)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: is missing"):
        load_model(tmp_path, spec)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {}}'])
def test_a_bad_index_is_named(tmp_path: Path, source: Any, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_model(tmp_path, spec_of(source.values))


def test_one_error_names_every_missing_extra_and_misshapen_tensor(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    del tensors[WEIGHT]
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary.weight"] = torch.zeros(2)
    tensors["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, source, tensors)
    text = str(caught.value)
    assert f"{WEIGHT}: is missing" in text
    assert "lm_head.weight: is missing" in text
    assert "model.layers.0.self_attn.rotary.weight: is not part of this model" in text
    assert "model.norm.weight: has shape [63], must be [64]" in text
    assert "model.safetensors" in text


def test_tensors_that_no_model_is_made_of_are_left_with_a_line_each(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    shared, full = "model.layers.1.self_attn.indexer.", "model.layers.0.self_attn.indexer."
    extra = {
        f"{shared}wk.weight": torch.zeros(128, 64),
        f"{shared}k_norm.bias": torch.zeros(128),
        f"{full}q_rot": torch.eye(128),
        "rot.weight": torch.eye(64),
    }
    with caplog.at_level(logging.INFO):
        decoder = load(tmp_path, source, tensors | extra)
    assert decoder.layers[1].self_attn.indexer is None
    said = [line for line in caplog.messages if line.startswith("left")]
    assert said == [
        "left 1 tensors unread: rotations of the index heads",
        "left 2 tensors unread: indexers of layers that share another's selection",
        "left 1 tensors unread: the rotation of drafts",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.indexer.wz.weight",
        "model.layers.4.self_attn.indexer.wk.weight",
        "model.layers.1.self_attn.indexers.wk.weight",
        "rotary.weight",
    ],
)
def test_what_only_resembles_those_is_extra(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor], name: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: is not part"):
        load(tmp_path, source, tensors | {name: torch.zeros(1)})


def test_a_wrong_type_is_named(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    tensors[WEIGHT] = tensors[WEIGHT].to(torch.int8)
    with pytest.raises(CheckpointError, match=f"{WEIGHT}: has type I8"):
        load(tmp_path, source, tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_named(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor], value: float
) -> None:
    tensors[WEIGHT][0, 0] = value
    with pytest.raises(CheckpointError, match=f"{WEIGHT}: holds NaN or infinity"):
        load(tmp_path, source, tensors)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (0, "is empty"),
        (4, "is truncated: has 4 bytes"),
        (1000, r"is truncated: header of \d+ bytes in a file of 1000"),
        (-100, r"model\.norm\.weight: is truncated: ends at byte \d+ of a file of \d+"),
    ],
)
def test_a_truncated_file_is_named(tmp_path: Path, source: Any, kept: int, reason: str) -> None:
    whole = (source.path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {reason}"):
        load_model(tmp_path, spec_of(source.values))


def test_a_missing_file_is_named(tmp_path: Path, source: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is missing"):
        load_model(tmp_path, spec_of(source.values))


def mtp_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    spec = ModelSpec(config=config, dtype=torch.float32, device=torch.device("meta"))
    slots = MTPLayer(spec).slots()
    return {slot.name: torch.zeros(slot.shape) for slot in slots if slot.is_required}


def test_a_whole_mtp_layer_is_left_in_the_file(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    config = ModelConfig.from_dict(source.values | {"num_nextn_predict_layers": 1})
    decoder = load(tmp_path, source, tensors | mtp_tensors(config), num_nextn_predict_layers=1)
    assert len(decoder.layers) == 4


def test_a_part_of_an_mtp_layer_is_a_fault(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    config = ModelConfig.from_dict(source.values | {"num_nextn_predict_layers": 1})
    extra = mtp_tensors(config)
    del extra["model.layers.4.eh_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj\.weight: is missing"):
        load(tmp_path, source, tensors | extra, num_nextn_predict_layers=1)


def test_an_mtp_layer_that_the_config_does_not_know_is_extra(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    tensors["model.layers.4.enorm.weight"] = torch.zeros(64)
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.enorm\.weight: is not part"):
        load(tmp_path, source, tensors)


def test_a_tied_head_needs_no_tensor(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    del tensors["lm_head.weight"]
    decoder = load(tmp_path, source, tensors, tie_word_embeddings=True)
    assert torch.equal(nz.plain(decoder.lm_head.weight).T, tensors["model.embed_tokens.weight"])


def test_a_head_beside_a_config_that_ties_it_is_refused(
    tmp_path: Path, source: Any, tensors: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: is not part"):
        load(tmp_path, source, tensors, tie_word_embeddings=True)


def test_what_does_not_fit_is_told_before_memory_is_taken(
    tmp_path: Path,
    source: Any,
    tensors: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = Decoder.build

    def nowhere(spec: ModelSpec) -> Decoder:
        assert spec.device.type == "meta"
        return build(spec)

    monkeypatch.setattr(Decoder, "build", nowhere)
    del tensors[WEIGHT]
    with pytest.raises(CheckpointError, match=f"{WEIGHT}: is missing"):
        load(tmp_path, source, tensors)
