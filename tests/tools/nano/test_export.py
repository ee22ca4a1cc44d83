"""The shipped checkpoint: exact GLM-5.2 layout, small enough, and the same function everywhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import GlmMoeDsaForCausalLM

from tools.nano.data import Encoder
from tools.nano.export import checkpoint_tensors, load_checkpoint
from tools.nano.model import Nano, Trace, causal_mask
from tools.nano.tasks import make_task

FOLDER = Path(__file__).parents[3] / "models" / "glm-nano"
MIB = 2**20


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def nano() -> Nano:
    return load_checkpoint(FOLDER)


def _attention(c: dict[str, Any], prefix: str, *, has_indexer: bool) -> dict[str, list[int]]:
    heads, hidden, rank = c["num_attention_heads"], c["hidden_size"], c["q_lora_rank"]
    shapes = {
        "q_a_proj.weight": [rank, hidden],
        "q_a_layernorm.weight": [rank],
        "q_b_proj.weight": [heads * (c["qk_nope_head_dim"] + 64), rank],
        "kv_a_proj_with_mqa.weight": [512 + 64, hidden],
        "kv_a_layernorm.weight": [512],
        "kv_b_proj.weight": [heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), 512],
        "o_proj.weight": [hidden, heads * c["v_head_dim"]],
    }
    if has_indexer:
        shapes |= {
            "indexer.wq_b.weight": [c["index_n_heads"] * 128, rank],
            "indexer.wk.weight": [128, hidden],
            "indexer.k_norm.weight": [128],
            "indexer.k_norm.bias": [128],
            "indexer.weights_proj.weight": [c["index_n_heads"], hidden],
        }
    norms = {f"{prefix}{name}_layernorm.weight": [hidden] for name in ("input", "post_attention")}
    return {f"{prefix}self_attn.{name}": shape for name, shape in shapes.items()} | norms


def _mlp(prefix: str, hidden: int, size: int) -> dict[str, list[int]]:
    up = {f"{prefix}{name}_proj.weight": [size, hidden] for name in ("gate", "up")}
    return up | {f"{prefix}down_proj.weight": [hidden, size]}


def _experts(c: dict[str, Any], prefix: str) -> dict[str, list[int]]:
    hidden, size, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    shapes = {
        f"{prefix}gate.weight": [count, hidden],
        f"{prefix}gate.e_score_correction_bias": [count],
    } | _mlp(f"{prefix}shared_experts.", hidden, size * c["n_shared_experts"])
    for index in range(count):
        shapes |= _mlp(f"{prefix}experts.{index}.", hidden, size)
    return shapes


def expected_shapes(c: dict[str, Any]) -> dict[str, list[int]]:
    hidden, last = c["hidden_size"], c["num_hidden_layers"]
    shapes = {
        "model.embed_tokens.weight": [c["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [c["vocab_size"], hidden],
    }
    for layer in range(last + 1):
        prefix = f"model.layers.{layer}."
        has_indexer = layer == last or c["indexer_types"][layer] == "full"
        shapes |= _attention(c, prefix, has_indexer=has_indexer)
        if layer < c["first_k_dense_replace"]:
            shapes |= _mlp(f"{prefix}mlp.", hidden, c["intermediate_size"])
        else:
            shapes |= _experts(c, f"{prefix}mlp.")
    mtp = f"model.layers.{last}."
    norms = {f"{mtp}{name}.weight": [hidden] for name in ("enorm", "hnorm", "shared_head.norm")}
    return shapes | norms | {f"{mtp}eh_proj.weight": [hidden, 2 * hidden]}


def test_tensors_are_exactly_those_the_config_asks_for(config: dict[str, Any]) -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        shapes = {name: part.get_shape() for name, part in found.items()}
        types = {name: part.get_dtype() for name, part in found.items()}
    assert shapes == expected_shapes(config)
    for name, dtype in types.items():
        assert dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16")


def test_checkpoint_stays_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    assert sum(sizes) <= 16 * MIB
    assert max(sizes) < 16 * MIB


def test_loading_and_exporting_again_changes_nothing(nano: Nano) -> None:
    again = checkpoint_tensors(nano, nano.state_dict())
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        for name, tensor in again.items():
            assert torch.equal(tensor, file.get_tensor(name)), name


@pytest.mark.parametrize("length", [60, 300])
def test_sparse_training_model_equals_transformers(nano: Nano, length: int) -> None:
    # float32 on both sides: products in another order differ by about 1e-5, and now and then two
    # tokens whose index scores are nearly equal swap places at the edge of the selection
    oracle = GlmMoeDsaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ids = torch.randint(0, nano.config["vocab_size"], (1, length), generator=torch.manual_seed(0))
    with torch.no_grad():
        ours = nano.lm_head(nano.trunk(ids, Trace("sparse", causal_mask(torch.zeros_like(ids)))))
        gap = (ours - oracle(ids).logits).abs().amax(-1)
    assert gap[:, : nano.config["index_topk"]].max() < 1e-3
    assert (gap < 1e-3).float().mean() > 0.97


CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", re.DOTALL)


def _answer(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Reads content and calls out of generated text; integers by the declared type."""
    declared = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools}
    calls = []
    for body in CALL.findall(text):
        name = body.split("<arg_key>")[0]
        types = declared.get(name, {})
        arguments = {
            key: int(value) if types.get(key, {}).get("type") == "integer" else value
            for key, value in ARGUMENT.findall(body)
        }
        calls.append({"name": name, "arguments": arguments})
    return CALL.sub("", text.rpartition("</think>")[2]), calls


def test_transformers_solves_fresh_tasks_with_the_checkpoint() -> None:
    oracle = GlmMoeDsaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    encoder, right = Encoder(FOLDER), 0
    for skill in ("echo", "json", "tool_call"):
        for seed in range(4):
            task = make_task(skill, seed)
            prompt = encoder.template.render(task.messages, task.tools, **task.chat_template_kwargs)
            ids = torch.tensor([encoder.tokenizer.encode(prompt).ids])
            with torch.no_grad():
                said = oracle.generate(ids, do_sample=False, max_new_tokens=128)[
                    0, ids.shape[1] : -1
                ]
            text = encoder.tokenizer.decode(said.tolist(), skip_special_tokens=False)
            content, calls = _answer(text, task.tools)
            right += task.check(content, "", calls)
    assert right >= 10  # of 12; the floor is nine in ten
