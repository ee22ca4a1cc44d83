"""The training model: its parts against plain formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.nano.config import SIZES
from tools.nano.model import Experts, Gate, Nano, NormFunction, Trace, causal_mask
from tools.nano.start import initialise

SMALL: dict[str, Any] = SIZES | {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "indexer_types": ["full", "shared"],
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 4,
}


@pytest.fixture
def model() -> Nano:
    nano = Nano(SMALL, max_length=64)
    initialise(nano)
    return nano


def test_norm_and_its_gradients_equal_the_formula() -> None:
    x = torch.randn(3, 5, 32, requires_grad=True)
    weight = torch.randn(32, requires_grad=True)
    slope = torch.randn(3, 5, 32)
    ours = torch.autograd.grad(NormFunction.apply(x, weight, 1e-5, x.dtype), (x, weight), slope)
    theirs = torch.autograd.grad(F.rms_norm(x, (32,), weight, 1e-5), (x, weight), slope)
    torch.testing.assert_close(ours, theirs)


def test_gate_chooses_by_bias_and_weighs_without_it() -> None:
    gate = Gate(SMALL)
    torch.nn.init.normal_(gate.weight)
    x = torch.randn(50, SMALL["hidden_size"])
    gate.e_score_correction_bias[3] = 10.0
    weights = gate(x)
    assert (weights[:, 3] > 0).all()
    assert ((weights > 0).sum(-1) == 2).all()
    torch.testing.assert_close(weights.sum(-1), torch.full((50,), 2.5))


def test_balancing_raises_the_bias_of_idle_experts() -> None:
    gate = Gate(SMALL)
    gate.load.copy_(torch.tensor([8.0, 0, 0, 0, 0, 0, 0, 0]))
    gate.balance(0.1)
    assert gate.e_score_correction_bias[0] < 0 < gate.e_score_correction_bias[1]


def test_experts_sum_only_the_chosen() -> None:
    experts = Experts(SMALL)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, weights = torch.randn(4, SMALL["hidden_size"]), torch.zeros(4, 8)
    weights[:, 2] = 0.7
    up = F.silu(x @ experts.gate_proj[2].T) * (x @ experts.up_proj[2].T)
    torch.testing.assert_close(experts(x, weights), 0.7 * up @ experts.down_proj[2].T)


def test_first_layer_looks_back_before_any_training(model: Nano) -> None:
    ids = torch.randint(0, 64, (1, 24))
    layer = model.layers[0]
    normed = layer.input_layernorm(model.embed_tokens(ids))
    _, q, k, _ = layer.self_attn.heads_of(normed, model.rope(24))
    mask = causal_mask(torch.zeros_like(ids))
    attention = (q @ k.mT * q.shape[-1] ** -0.5 + mask).softmax(-1)
    for head in range(3):
        assert attention[0, head].diagonal(-(head + 1))[8:].min() > 0.5


def test_episodes_in_one_row_do_not_see_each_other(model: Nano) -> None:
    ids = torch.randint(0, 64, (1, 20))
    documents = torch.tensor([[0] * 8 + [1] * 12])
    both = model.trunk(ids, Trace("dense", causal_mask(documents)))
    changed = ids.clone()
    changed[0, :8] = 1
    other = model.trunk(changed, Trace("dense", causal_mask(documents)))
    torch.testing.assert_close(both[:, 8:], other[:, 8:])


def test_sparse_attention_sees_no_more_than_the_selection(model: Nano) -> None:
    ids = torch.randint(0, 64, (1, 20))
    trace = Trace("sparse", causal_mask(torch.zeros_like(ids)))
    model.trunk(ids, trace)
    seen = (trace.mask > -1).sum(-1)[0]
    assert seen.tolist() == [min(position + 1, 4) for position in range(20)]


def test_indexer_lessons_do_not_move_the_trunk(model: Nano) -> None:
    ids = torch.randint(0, 64, (1, 20))
    trace = Trace("index", causal_mask(torch.zeros_like(ids)), torch.ones(1, 20))
    model.trunk(ids, trace)
    torch.stack(trace.losses).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert all(".indexer." in name for name in moved)


def test_draft_at_a_position_depends_on_nothing_later(model: Nano) -> None:
    ids = torch.randint(0, 64, (1, 20))
    documents = torch.zeros_like(ids)

    def drafts(tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.trunk(tokens, Trace("dense", causal_mask(documents)))
        return model.draft(tokens, hidden, documents, Trace("dense", causal_mask(documents[:, 1:])))

    changed = ids.clone()
    changed[0, 12:] = 1
    torch.testing.assert_close(drafts(ids)[:, :11], drafts(changed)[:, :11])
