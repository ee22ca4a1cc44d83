"""The training form of glm-nano: GLM-5.2's decoder in plain PyTorch, named as in the checkpoint.

It knows three ways to attend: `dense` (every earlier token), `index` (dense, and the indexer's
score is compared with the attention it must imitate) and `sparse` (only what the indexer selects,
as when serving). All experts are computed and weighted, zero for those not chosen: at these sizes
one large product is faster than sorting tokens.

Shapes: B rows, T tokens, H heads, D head size, C latent size, E experts.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mode = Literal["dense", "index", "sparse"]
Config = dict[str, Any]

HIDDEN = -30_000.0
"""Added to the score of a token that may not be seen."""


def causal_mask(documents: Tensor) -> Tensor:
    """Returns the additive mask [B, T, T]; ``documents`` [B, T] numbers the episodes in rows."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill_(~seen, HIDDEN)


class NormFunction(torch.autograd.Function):
    """RMS norm with few passes over memory and no mixed types, which CPUs are slow at."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:  # noqa: ANN401
        """Returns the normalised and scaled rows in ``dtype``."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = (size.square() / x.shape[-1] + eps).rsqrt()
        normed = (x * inverse.to(x.dtype)).to(dtype)
        weight = weight.to(dtype)
        ctx.save_for_backward(normed, weight, inverse)
        ctx.dtype = x.dtype
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        """Returns the gradients of rows and scale."""
        normed, weight, inverse = ctx.saved_tensors
        gradient = gradients[0].to(normed.dtype)
        product = (gradient * normed).flatten(0, -2)
        mean = (product @ weight).unflatten(0, gradient.shape[:-1]).unsqueeze(-1) / weight.numel()
        result = (gradient * weight).addcmul_(normed, mean, value=-1).mul_(inverse.to(normed.dtype))
        ones = torch.ones(1, product.shape[0], dtype=product.dtype)
        return result.to(ctx.dtype), (ones @ product)[0].float(), None, None


class RMSNorm(nn.Module):
    """Normalises and scales; in bfloat16 where autocast is on."""

    def __init__(self, size: int, eps: float) -> None:
        """Starts at scale one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        result: Tensor = NormFunction.apply(x, self.weight, self.eps, dtype)
        return result


def rope_table(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, [length, rope size / 2]."""
    size = config["qk_rope_head_dim"]
    frequencies = config["rope_parameters"]["rope_theta"] ** (
        -torch.arange(0, size, 2).float() / size
    )
    angles = torch.arange(length).float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates interleaved pairs of [B, T, H, D]; the result holds even parts, then odd parts."""
    cos, sin = (table[:, None, :].to(x.dtype) for table in rope)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


class Indexer(nn.Module):
    """Scores every earlier token for every token; the best `index_topk` are attended to."""

    def __init__(self, config: Config) -> None:
        """Builds the projections."""
        super().__init__()
        self.num_heads, self.size = config["index_n_heads"], config["index_head_dim"]
        self.rope_size = config["qk_rope_head_dim"]
        self.wq_b = nn.Linear(config["q_lora_rank"], self.num_heads * self.size, bias=False)
        self.wk = nn.Linear(config["hidden_size"], self.size, bias=False)
        self.k_norm = nn.LayerNorm(self.size, eps=1e-6)
        self.weights_proj = nn.Linear(config["hidden_size"], self.num_heads, bias=False)

    def forward(self, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Returns scores [B, T, T] without the causal mask."""
        q = self.wq_b(q_latent).unflatten(-1, (self.num_heads, self.size))
        k = self.k_norm(self.wk(x)).unsqueeze(2)
        q, k = (
            torch.cat((rotate(t[..., : self.rope_size], rope), t[..., self.rope_size :]), -1)
            for t in (q, k)
        )
        weights = self.weights_proj(x).float() * self.num_heads**-0.5
        total = torch.zeros((), device=x.device)
        for head in range(self.num_heads):
            score = (q[:, :, head] @ k[:, :, 0].mT).float() * self.size**-0.5
            total = total + score.relu() * weights[:, :, head, None]
        return total


class Attention(nn.Module):
    """Latent attention with an optional indexer."""

    def __init__(self, config: Config, *, has_indexer: bool) -> None:
        """Builds the projections."""
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.heads, self.topk = heads, config["index_topk"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.latent = config["v_head_dim"], config["kv_lora_rank"]
        eps = config["latent_norm_eps"]
        self.q_a_proj = nn.Linear(hidden, config["q_lora_rank"], bias=False)
        self.q_a_layernorm = RMSNorm(config["q_lora_rank"], eps)
        self.q_b_proj = nn.Linear(
            config["q_lora_rank"], heads * (self.nope + self.rope), bias=False
        )
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(heads * self.value, hidden, bias=False)
        self.indexer = Indexer(config) if has_indexer else None

    def heads_of(
        self, x: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the query latent and q, k, v as [B, H, T, D]."""
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (self.heads, -1))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.latent, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split((self.nope, self.value), -1)
        k_rope = rotate(k_rope.unsqueeze(2), rope).expand(-1, -1, self.heads, -1)
        q = torch.cat((q[..., : self.nope], rotate(q[..., self.nope :], rope)), -1)
        k = torch.cat((k_nope, k_rope), -1)
        return q_latent, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attends with an additive ``mask`` [B, T, T]; plain products beat the fused kernel."""
        rows, heads, _, width = q.shape
        bias = mask.to(q.dtype).unsqueeze(1).expand(rows, heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=width**-0.5)
        out = scores.softmax(-1).to(v.dtype) @ v.flatten(0, 1)
        return self.o_proj(out.unflatten(0, (rows, heads)).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, hidden: int, size: int) -> None:
        """Builds the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """Routed experts, stacked: gate and up are [E, size, hidden], down is [E, hidden, size]."""

    def __init__(self, config: Config) -> None:
        """Builds the stacked weights."""
        super().__init__()
        count, hidden = config["n_routed_experts"], config["hidden_size"]
        size = config["moe_intermediate_size"]
        self.gate_proj = nn.Parameter(torch.empty(count, size, hidden))
        self.up_proj = nn.Parameter(torch.empty(count, size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sums the experts by ``weights`` [.., E]."""
        inner = F.silu(F.linear(x, self.gate_proj.flatten(0, 1))) * F.linear(
            x, self.up_proj.flatten(0, 1)
        )
        inner = inner.unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class Gate(nn.Module):
    """The sigmoid router with a correction bias that only decides who is chosen."""

    def __init__(self, config: Config) -> None:
        """Starts unbiased."""
        super().__init__()
        self.topk, self.scale = config["num_experts_per_tok"], config["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.empty(config["n_routed_experts"], config["hidden_size"]))
        self.register_buffer("e_score_correction_bias", torch.zeros(config["n_routed_experts"]))
        self.register_buffer("load", torch.zeros(config["n_routed_experts"]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns weights [.., E], zero for experts not chosen."""
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.topk, -1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().flatten(0, -2).sum(0)
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Moves the bias towards experts used too little since the last call."""
        mean = self.load.mean()
        self.e_score_correction_bias += rate * torch.sign(mean - self.load)
        self.load.zero_()


class MoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, config: Config) -> None:
        """Builds router and experts."""
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config)
        size = config["moe_intermediate_size"] * config["n_shared_experts"]
        self.shared_experts = MLP(config["hidden_size"], size)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer."""
        return self.experts(x, self.gate(x)) + self.shared_experts(x)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a normalised residual."""

    def __init__(self, config: Config, *, has_indexer: bool, is_sparse: bool) -> None:
        """Builds one layer."""
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.self_attn = Attention(config, has_indexer=has_indexer)
        self.mlp = MoE(config) if is_sparse else MLP(hidden, config["intermediate_size"])
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], trace: "Trace") -> Tensor:
        """Applies the layer, choosing tokens as ``trace`` says."""
        normed = self.input_layernorm(x)
        q_latent, q, k, v = self.self_attn.heads_of(normed, rope)
        trace.see(self.self_attn, normed, q_latent, rope, q, k)
        x = x + self.self_attn.attend(q, k, v, trace.mask).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


class Trace:
    """What passes from layer to layer: the mask, the selection, the indexers' lessons."""

    def __init__(self, mode: Mode, mask: Tensor, weights: Tensor | None = None) -> None:
        """``mask`` is `causal_mask`'s; ``weights`` [B, T] says whose attention to imitate."""
        self.mode = mode
        self.base = mask
        self.mask = mask
        self.weights = weights
        self.scores: Tensor | None = None
        self.losses: list[Tensor] = []

    def see(
        self, attention: Attention, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor],
        q: Tensor, k: Tensor,
    ) -> None:  # fmt: skip
        """Lets a full layer choose; compares the last choice with what this layer attends to."""
        if self.mode == "dense":
            return
        if attention.indexer is not None:
            self.scores = attention.indexer(x.detach(), q_latent.detach(), rope) + self.base
            if self.mode == "sparse" and x.shape[1] > attention.topk:
                best = self.scores.detach().topk(attention.topk, -1).indices
                hidden = torch.full_like(self.scores, HIDDEN).scatter_(-1, best, 0.0)
                self.mask = torch.minimum(hidden, self.base)
        if self.weights is not None:
            self.losses.append(self._divergence(q.detach(), k.detach()))

    def _divergence(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns KL(attention, averaged over heads || indexer), over the tokens in play."""
        assert self.scores is not None
        assert self.weights is not None
        with torch.no_grad():
            target = torch.zeros_like(self.scores)
            for head in range(q.shape[1]):
                logits = (q[:, head] @ k[:, head].mT).float() * q.shape[-1] ** -0.5
                target += (logits + self.mask).softmax(-1)
            target /= q.shape[1]
        index = (self.scores + self.mask).log_softmax(-1).clamp(min=-50.0)
        terms = F.kl_div(index, target, reduction="none").sum(-1)
        return (terms * self.weights).sum() / self.weights.sum().clamp(min=1e-6)


class Nano(nn.Module):
    """The whole decoder; `layers[num_hidden_layers]` is the MTP layer."""

    def __init__(self, config: Config, max_length: int = 2048) -> None:
        """Builds the layers without initialising them; see `tools.nano.start`."""
        super().__init__()
        self.config = config
        hidden, eps, count = (
            config["hidden_size"],
            config["rms_norm_eps"],
            config["num_hidden_layers"],
        )
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(config, has_indexer=kind == "full", is_sparse=mlp == "sparse")
            for kind, mlp in zip(config["indexer_types"], config["mlp_layer_types"], strict=True)
        )
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)
        self.mtp = MTPLayer(config)
        self.num_layers = count
        for name, table in zip(("cos", "sin"), rope_table(config, max_length), strict=True):
            self.register_buffer(name, table, persistent=False)

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns the rotation tables of the first positions."""
        return self.cos[:length], self.sin[:length]

    def trunk(self, ids: Tensor, trace: Trace) -> Tensor:
        """Returns the hidden states after the final norm, [B, T, hidden]."""
        x = self.embed_tokens(ids)
        rope = self.rope(ids.shape[1])
        for layer in self.layers:
            x = layer(x, rope, trace)
        return self.norm(x)

    def draft(self, ids: Tensor, hidden: Tensor, documents: Tensor, trace: Trace) -> Tensor:
        """Returns the MTP layer's hidden states: position i sees hidden i and token i + 1.

        As upstream does, the token is left out at the first position of an episode.
        """
        later = (documents[:, 1:-1] == documents[:, :-2]).float()
        later = F.pad(later, (1, 0)).unsqueeze(-1)
        embedded = self.embed_tokens(ids[:, 1:]) * later
        return self.mtp(embedded, hidden[:, :-1], self.rope(ids.shape[1] - 1), trace)


class MTPLayer(nn.Module):
    """Predicts the token after next from a hidden state and the next token."""

    def __init__(self, config: Config) -> None:
        """Builds the layer; its indexer is always its own."""
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = DecoderLayer(config, has_indexer=True, is_sparse=True)
        self.shared_head_norm = RMSNorm(hidden, eps)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], trace: Trace
    ) -> Tensor:
        """Returns hidden states ready for the main model's head."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.shared_head_norm(self.block(x, rope, trace))
