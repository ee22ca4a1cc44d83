"""The MTP layer against a formula of its own: transformers has none.

The oracle is a transformers model of one layer, fed with joined states; what joins them and the
order of the halves is written down here. Bounds are those of the decoder's tests.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.mtp import MTPLayer
from services.worker.model.placement import Placement
from services.worker.model.slots import WeightSlot
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription
from tests.services.worker.conftest import write_checkpoint
from tests.services.worker.model.conftest import Driver

LOGITS = 1e-4

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selection_from_the_start": {"index_topk": 16, "num_attention_heads": 8},
    "other_sizes": {"hidden_size": 48, "v_head_dim": 24, "n_shared_experts": 2},
}


def slots(values: dict[str, Any], **changes: Any) -> list[WeightSlot]:
    config = ModelConfig.from_dict(values | {"num_nextn_predict_layers": 1})
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"), **changes)
    return list(MTPLayer(spec).slots())


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def joined(checkpoint: Any, tokens: list[int], hidden: Tensor) -> Tensor:
    """What the layer reads: at position i the embedding of token i + 1 beside hidden state i."""
    tensors = load_file(str(checkpoint.path / "model.safetensors"))
    prefix = f"model.layers.{checkpoint.values['num_hidden_layers']}."
    embedded = tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
    embedded[0] = 0
    halves = (
        rms(embedded, tensors[f"{prefix}enorm.weight"]),
        rms(hidden, tensors[f"{prefix}hnorm.weight"]),
    )
    return torch.cat(halves, 1) @ tensors[f"{prefix}eh_proj.weight"].T


def oracle_states(checkpoint: Any, tokens: list[int], hidden: Tensor) -> Tensor:
    with torch.no_grad():
        inputs = joined(checkpoint, tokens, hidden)[None]
        return checkpoint.mtp.model(inputs_embeds=inputs).last_hidden_state[0]


def oracle_logits(checkpoint: Any, states: Tensor) -> Tensor:
    with torch.no_grad():
        return checkpoint.model.lm_head(states)


def run(driver: Any, tokens: list[int], cuts: list[int]) -> Tensor:
    """Main model, then the MTP layer over the same steps; states of all positions but the last."""
    decoder, parts = driver.decoder, []
    bounds = [0, *cuts, len(tokens) - 1]
    for start, end in itertools.pairwise(bounds):
        step = driver.metadata([(0, tokens[start:end])], 0)
        hidden = decoder.forward(torch.tensor(tokens[start:end]), step, driver.caches)
        later = torch.tensor(tokens[start + 1 : end + 1])
        parts.append(decoder.draft(later, hidden, step, driver.caches))
        driver.computed[0] = end
    return torch.cat(parts)


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 60, 61]])
@pytest.mark.parametrize("name", CONFIGS)
def test_states_equal_the_formula_whatever_the_chunks(
    name: str,
    cuts: list[int],
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    random_tokens: Callable[..., list[int]],
) -> None:
    checkpoint = make_checkpoint(seed=3, num_nextn_predict_layers=1, **CONFIGS[name])
    tokens = random_tokens(90)
    driver = make_driver(checkpoint, has_mtp=True)
    states = run(driver, tokens, cuts)
    with torch.no_grad():
        hidden = checkpoint.model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    expected = oracle_states(checkpoint, tokens[1:], hidden)
    torch.testing.assert_close(states, expected, atol=LOGITS, rtol=0)
    ours = driver.decoder.compute_draft_logits(states)
    torch.testing.assert_close(ours, oracle_logits(checkpoint, expected), atol=LOGITS, rtol=0)


def test_its_own_states_can_be_fed_again(
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    random_tokens: Callable[..., list[int]],
) -> None:
    checkpoint = make_checkpoint(num_nextn_predict_layers=1)
    tokens = random_tokens(40)
    driver = make_driver(checkpoint, has_mtp=True)
    states = [run(driver, tokens[:31], [])[-1:]]
    for place in range(31, 34):
        step = driver.metadata([(0, [0])], 0)
        states.append(
            driver.decoder.draft(
                torch.tensor(tokens[place : place + 1]), states[-1], step, driver.caches
            )
        )
        driver.computed[0] += 1
    with torch.no_grad():
        hidden = checkpoint.model.model(torch.tensor([tokens[:30]])).last_hidden_state[0]
    for place in range(31, 34):
        again = oracle_states(checkpoint, tokens[1:place], hidden)[-1:]
        hidden = torch.cat((hidden, again))
    expected = oracle_states(checkpoint, tokens[1:34], hidden)[-4:]
    torch.testing.assert_close(torch.cat(states), expected, atol=LOGITS, rtol=0)


def test_the_main_model_is_the_same_with_and_without_the_layer(
    make_checkpoint: Callable[..., Any],
    make_driver: Callable[..., Any],
    random_tokens: Callable[..., list[int]],
) -> None:
    checkpoint = make_checkpoint(num_nextn_predict_layers=1)
    tokens = random_tokens(50)
    plain = make_driver(checkpoint).run(tokens, [])
    assert torch.equal(make_driver(checkpoint, has_mtp=True).run(tokens, []), plain)


def test_a_rotation_is_applied_at_every_pass_and_the_layer_has_a_head_of_its_own(
    make_checkpoint: Callable[..., Any], random_tokens: Callable[..., list[int]], tmp_path: Path
) -> None:
    """With Q = 1 `rot.weight` is the folded norm: taken out of the main norm, put in again here."""
    checkpoint = make_checkpoint(num_nextn_predict_layers=1)
    folded = load_file(str(checkpoint.path / "model.safetensors"))
    prefix = "model.layers.4.shared_head."
    gamma = folded["model.norm.weight"].clone()
    own = folded[f"{prefix}norm.weight"].clone()
    folded["rot.weight"] = torch.diag(gamma)
    folded[f"{prefix}head.weight"] = folded["lm_head.weight"] * own
    folded["lm_head.weight"] = folded["lm_head.weight"] * gamma
    for name in ("model.norm.weight", f"{prefix}norm.weight"):
        folded[name] = torch.ones_like(folded[name])
    write_checkpoint(tmp_path, checkpoint.values, folded)
    spec = ModelSpec(
        config=ModelConfig.from_dir(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        has_mtp=True,
        quantization=QuantDescription(is_rot_used=True),
    )
    rotated = load_model(tmp_path, spec)
    plain = load_model(checkpoint.path, replace(spec, quantization=QuantDescription()))
    logits = [first_draft_logits(decoder, random_tokens(20)) for decoder in (rotated, plain)]
    torch.testing.assert_close(logits[0], logits[1], atol=LOGITS, rtol=0)


def first_draft_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    return decoder.compute_draft_logits(run(Driver(decoder, 1, 128), tokens, []))


def test_mtp_tensors_are_those_of_the_release(tiny_values: dict[str, Any]) -> None:
    shapes = {slot.name: slot.shape for slot in slots(tiny_values) if slot.is_required}
    assert shapes["model.layers.4.eh_proj.weight"] == (64, 128)
    assert shapes["model.layers.4.shared_head.norm.weight"] == (64,)
    assert shapes["model.layers.4.self_attn.indexer.wk.weight"] == (128, 64)
    assert shapes["model.layers.4.mlp.experts.7.down_proj.weight"] == (64, 32)
    assert "rot.weight" not in shapes


def test_copies_of_embeddings_and_head_are_optional_and_not_read(
    tiny_values: dict[str, Any],
) -> None:
    optional = {slot.name: slot for slot in slots(tiny_values) if not slot.is_required}
    assert optional.keys() == {
        "model.layers.4.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight",
    }
    assert all(slot.kept_shape == (0, 0) for slot in optional.values())


def test_the_last_stage_alone_has_the_layer_and_then_embeddings_too(
    tiny_values: dict[str, Any],
) -> None:
    config = ModelConfig.from_dict(tiny_values | {"num_nextn_predict_layers": 1})
    spec = ModelSpec(config=config, dtype=torch.bfloat16, device=torch.device("meta"), has_mtp=True)
    first = Decoder.build(replace(spec, placement=Placement(last_layer=2)))
    last = Decoder.build(replace(spec, placement=Placement(first_layer=2)))
    names = [{slot.name for slot in stage.slots()} for stage in (first, last)]
    assert first.mtp is None
    assert last.mtp is not None
    assert ["model.layers.4.eh_proj.weight" in found for found in names] == [False, True]
    assert ["model.embed_tokens.weight" in found for found in names] == [True, True]
