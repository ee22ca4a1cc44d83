"""The MTP layer against an independent float32 formula, and how often its first draft is right."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tools.nano.data import Encoder
from tools.nano.export import load_checkpoint
from tools.nano.model import Nano, Trace, causal_mask
from tools.nano.tasks import make_episode

FOLDER = Path(__file__).parents[3] / "models" / "glm-nano"
CONFIG = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
WEIGHTS = {name: t.float() for name, t in load_file(FOLDER / "model.safetensors").items()}
LAYER = f"model.layers.{CONFIG['num_hidden_layers']}."


def _norm(x: Tensor, name: str, eps: float = CONFIG["rms_norm_eps"]) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * WEIGHTS[name]


def _linear(x: Tensor, name: str) -> Tensor:
    return x @ WEIGHTS[f"{LAYER}{name}.weight"].T


def _rope(x: Tensor) -> Tensor:
    """Rotates [T, H, 64] as complex numbers; the order of the parts cannot matter to a product."""
    angles = torch.outer(
        torch.arange(len(x)).float(),
        CONFIG["rope_parameters"]["rope_theta"] ** (-torch.arange(32).float() / 32),
    )
    turned = torch.view_as_complex(x.unflatten(-1, (32, 2)).contiguous())
    return torch.view_as_real(
        turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    ).flatten(-2)


def _attend(x: Tensor) -> Tensor:
    heads, nope = CONFIG["num_attention_heads"], CONFIG["qk_nope_head_dim"]
    q = _norm(_linear(x, "self_attn.q_a_proj"), f"{LAYER}self_attn.q_a_layernorm.weight", 1e-6)
    q = _linear(q, "self_attn.q_b_proj").unflatten(-1, (heads, -1))
    latent, shared = _linear(x, "self_attn.kv_a_proj_with_mqa").split((512, 64), -1)
    latent = _norm(latent, f"{LAYER}self_attn.kv_a_layernorm.weight", 1e-6)
    kv = _linear(latent, "self_attn.kv_b_proj").unflatten(-1, (heads, -1))
    k, v = kv[..., :nope], kv[..., nope:]
    scores = torch.einsum("qhd,khd->hqk", q[..., :nope], k)
    scores += torch.einsum("qhd,kd->hqk", _rope(q[..., nope:]), _rope(shared[:, None])[:, 0])
    scores /= CONFIG["qk_head_dim"] ** 0.5
    hidden = torch.ones(len(x), len(x)).triu(1).bool()
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return _linear(out.flatten(1), "self_attn.o_proj")


def _mlp(x: Tensor, name: str) -> Tensor:
    up = F.silu(_linear(x, f"{name}.gate_proj")) * _linear(x, f"{name}.up_proj")
    return _linear(up, f"{name}.down_proj")


def _experts(x: Tensor) -> Tensor:
    scores = _linear(x, "mlp.gate").sigmoid()
    bias = WEIGHTS[f"{LAYER}mlp.gate.e_score_correction_bias"]
    out = _mlp(x, "mlp.shared_experts")
    for row, best in enumerate(
        (scores + bias).topk(CONFIG["num_experts_per_tok"]).indices.tolist()
    ):
        total = scores[row, best].sum()
        for expert in best:
            share = scores[row, expert] / total * CONFIG["routed_scaling_factor"]
            out[row] += share * _mlp(x[row], f"mlp.experts.{expert}")
    return out


def draft_logits(ids: Tensor, hidden: Tensor) -> Tensor:
    """Returns, for position i, the logits of token i + 2 from hidden state i and token i + 1."""
    embedded = WEIGHTS["model.embed_tokens.weight"][ids[1:]]
    embedded[0] = 0.0
    parts = (_norm(embedded, f"{LAYER}enorm.weight"), _norm(hidden[:-1], f"{LAYER}hnorm.weight"))
    x = _linear(torch.cat(parts, -1), "eh_proj")
    x = x + _attend(_norm(x, f"{LAYER}input_layernorm.weight"))
    x = x + _experts(_norm(x, f"{LAYER}post_attention_layernorm.weight"))
    return _norm(x, f"{LAYER}shared_head.norm.weight") @ WEIGHTS["lm_head.weight"].T


@pytest.fixture(scope="module")
def nano() -> Nano:
    return load_checkpoint(FOLDER)


def _rows(skill: str, count: int) -> list[tuple[Tensor, int]]:
    """Returns token ids of eval episodes of at most 128 tokens and where the answer begins."""
    encoder, rng, rows = Encoder(FOLDER), random.Random(9), []
    while len(rows) < count:
        ids, weights = encoder.encode(make_episode(skill, rng, "eval"))
        if len(ids) <= CONFIG["index_topk"]:
            rows.append((torch.tensor(ids), weights.index(1.0)))
    return rows


def test_draft_layer_equals_the_formula(nano: Nano) -> None:
    (ids, _), *_ = _rows("echo", 1)
    with torch.no_grad():
        mask = causal_mask(torch.zeros(1, len(ids)))
        hidden = nano.trunk(ids[None], Trace("sparse", mask))
        trace = Trace("sparse", mask[:, :-1, :-1])
        ours = nano.lm_head(nano.draft(ids[None], hidden, torch.zeros_like(ids[None]), trace))
    torch.testing.assert_close(ours[0], draft_logits(ids, hidden[0]), atol=1e-3, rtol=1e-3)


def test_first_drafts_are_mostly_right(nano: Nano) -> None:
    right, total = 0, 0
    for skill in ("echo", "json", "sums"):
        for ids, start in _rows(skill, 5):
            with torch.no_grad():
                hidden = nano.trunk(
                    ids[None], Trace("sparse", causal_mask(torch.zeros(1, len(ids))))
                )
                target = nano.lm_head(hidden)[0].argmax(-1)[start:-1]
                drafts = draft_logits(ids, hidden[0]).argmax(-1)[start - 1 : -1]
            right += int((drafts == target).sum())
            total += len(target)
    assert right / total > 0.6
