"""A random-weight GLM checkpoint with the sizes of the serving race.

5 layers, hidden 192, 4 heads, latent 512 + 64, 16 experts top-4, as the peer's DeepSeek-V3-shaped
model has them, plus what GLM-5.2 adds: an indexer of 8 heads with index_topk 2048 on every second
layer. The tokenizer is trained as the peer's is, so token counts agree; the control tokens that
the gateway needs come on top (vocabulary 2,112 in place of 2,048: a little more work for us).
"""

import glob
import json
import os
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, EXPERTS, TOP_K = 192, 5, 4, 16, 4
NOPE, ROPE, V_HEAD, Q_LORA, KV_LORA = 64, 64, 64, 128, 512
DENSE_SIZE, EXPERT_SIZE, INDEX_HEADS, INDEX_DIM = 512, 128, 8, 128
BASE_VOCAB, VOCAB = 2048, 2112
INDEXER_TYPES = ["full", "shared", "full", "shared", "full"]


def make_random_model(folder: Path, nano: Path) -> Path:
    """Write the checkpoint into `folder` unless it is there; returns the folder."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    control = json.loads((nano / "tokenizer.json").read_text())["added_tokens"]
    _write_tokenizer(folder, control)
    (folder / "config.json").write_text(json.dumps(_config(), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    (folder / "chat_template.jinja").write_text((nano / "chat_template.jinja").read_text())
    _write_weights(folder)
    return folder


def _write_tokenizer(folder: Path, control: list[dict[str, object]]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))[:80]
    tokenizer.train_from_iterator(
        [Path(name).read_text(errors="ignore") for name in files],
        trainers.BpeTrainer(
            vocab_size=BASE_VOCAB,
            special_tokens=["<pad>", "<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(
        [
            AddedToken(str(token["content"]), special=bool(token["special"]), normalized=False)
            for token in control
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "pad_token": "<pad>"})
    )


def _config() -> dict[str, object]:
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE_SIZE,
        "moe_intermediate_size": EXPERT_SIZE,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense"] + ["sparse"] * (LAYERS - 1),
        "moe_layer_freq": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": Q_LORA,
        "kv_lora_rank": KV_LORA,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_HEAD,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": 2048,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "indexer_types": INDEXER_TYPES,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": [1],
        "pad_token_id": 0,
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(layer).items()}
    return shapes


def _layer_shapes(layer: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_a_proj.weight": (Q_LORA, HIDDEN),
        "self_attn.q_a_layernorm.weight": (Q_LORA,),
        "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_LORA),
        "self_attn.kv_a_proj_with_mqa.weight": (KV_LORA + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm.weight": (KV_LORA,),
        "self_attn.kv_b_proj.weight": (HEADS * (NOPE + V_HEAD), KV_LORA),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * V_HEAD),
    }
    if INDEXER_TYPES[layer] == "full":
        shapes |= {
            "self_attn.indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, Q_LORA),
            "self_attn.indexer.wk.weight": (INDEX_DIM, HIDDEN),
            "self_attn.indexer.k_norm.weight": (INDEX_DIM,),
            "self_attn.indexer.k_norm.bias": (INDEX_DIM,),
            "self_attn.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
        }
    if layer == 0:
        return shapes | _mlp_shapes("mlp.", DENSE_SIZE)
    shapes |= {"mlp.gate.weight": (EXPERTS, HIDDEN), "mlp.gate.e_score_correction_bias": (EXPERTS,)}
    for expert in range(EXPERTS):
        shapes |= _mlp_shapes(f"mlp.experts.{expert}.", EXPERT_SIZE)
    return shapes | _mlp_shapes("mlp.shared_experts.", EXPERT_SIZE)


def _mlp_shapes(prefix: str, size: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (size, HIDDEN),
        prefix + "up_proj.weight": (size, HIDDEN),
        prefix + "down_proj.weight": (HIDDEN, size),
    }


def _write_weights(folder: Path) -> None:
    import torch  # noqa: PLC0415  # only this function needs it, and it takes seconds
    from safetensors.torch import save_file  # noqa: PLC0415  # as above

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in _shapes().items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.zeros(shape)
        elif "norm" in name:
            fill = torch.zeros if name.endswith("bias") else torch.ones
            tensors[name] = fill(shape, dtype=torch.bfloat16)
        else:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
