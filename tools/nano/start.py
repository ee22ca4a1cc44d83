"""How training starts: weights, with the heads every skill needs already in place.

In layer 0 three heads look one, two and three tokens back from the first step on. They follow from
the rotary embedding: all embeddings share a constant in dimension 0, the rotary key is that
constant, and a head's query is the same constant turned by its distance. Copying then only has to
learn the match, and appears within a hundred steps.
"""

import math

import torch
from torch import nn

from tools.nano.model import Attention, Nano, rope_table

CONSTANT = 2.0
EMBEDDING_STD = 0.5
NUM_PAIRS = 6
"""Rotary pairs used by a look-back head; the fastest ones tell neighbours apart."""
SHARPNESS = 1.5


@torch.no_grad()
def initialise(model: Nano, seed: int = 0) -> None:
    """Sets every weight."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        scale = 0.3 if name.endswith(("down_proj.weight", "down_proj", "o_proj.weight")) else 1.0
        parameter.normal_(std=scale / math.sqrt(parameter.shape[-1]))
    model.embed_tokens.weight.normal_(std=EMBEDDING_STD)
    model.embed_tokens.weight[:, 0] = CONSTANT
    model.lm_head.weight.normal_(std=0.02)
    first = model.layers[0].self_attn
    nn.init.normal_(first.o_proj.weight, std=first.o_proj.weight.shape[1] ** -0.5)
    _look_back(first, model)


def _look_back(attention: Attention, model: Nano) -> None:
    """Makes head h of a layer attend h + 1 tokens back, for all heads but the last."""
    _, hidden = attention.q_a_proj.weight.shape
    attention.q_a_proj.weight[0] = 0.0
    attention.q_a_proj.weight[0, 0] = 4.0
    keys = attention.kv_a_proj_with_mqa.weight[attention.latent :]
    keys *= 0.2
    keys[: 2 * NUM_PAIRS] = torch.zeros(2 * NUM_PAIRS, hidden)
    keys[0 : 2 * NUM_PAIRS : 2, 0] = SHARPNESS
    cos, sin = rope_table(model.config, attention.heads)
    heads = attention.q_b_proj.weight.unflatten(0, (attention.heads, -1))
    heads[:, :, 1:] *= 0.5
    heads[:, :, 0] *= 0.1
    for head in range(attention.heads - 1):
        queries = heads[head, attention.nope :]
        queries[: 2 * NUM_PAIRS] = 0.0
        queries[0 : 2 * NUM_PAIRS : 2, 0] = SHARPNESS * cos[head + 1, :NUM_PAIRS]
        queries[1 : 2 * NUM_PAIRS : 2, 0] = -SHARPNESS * sin[head + 1, :NUM_PAIRS]
