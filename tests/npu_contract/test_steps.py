"""Whole decoder steps on meta tensors, through torch_npu's own shape functions."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import DeviceGuard, bind
from services.worker.ops.schemas import SCHEMAS
from tools.npu_contract.cases import STEPS, make_caches, make_step, model_configs

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
CONFIGS = model_configs()
# Results whose shape the wheel gives although a device leaves them undefined in our mode; the model
# reads none of them. The LSE of the paged attention, whose shape is wrong in the wheel (it takes
# the block size for the number of KV heads), is not asked for; see test_known_faults.
UNUSED = {
    "npu_kv_rmsnorm_rope_cache_v2": {0, 1},  # rows, only with is_output_kv
    "npu_lightning_indexer": {1},  # values, only with return_value
    "npu_sparse_flash_attention": {1, 2},  # LSE
    "npu_moe_gating_top_k": {2},  # scores, only with out_flag
    "npu_moe_init_routing_v2": {3},  # scales, only when quantizing
    "npu_rms_norm": {1},  # factors, for training
    "npu_add_rms_norm": {1},
}

Shape = tuple[tuple[int, ...], torch.dtype]


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


class Recorder(TorchDispatchMode):
    """Every device operator of a step with its arguments and results, and the names of the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any], list[torch.Tensor]]] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.namespace != "npu":
            if _has_kernel(func.name(), "CompositeImplicitAutograd"):
                with self:  # made of other operators on every device: note those
                    return func.decompose(*args, **named)
            self.others.add(func.name())
            return func(*args, **named)
        result = func(*args, **named)
        name = func._schema.name.removeprefix("npu::")
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        self.calls.append((name, bind(func._schema, args, named), results))
        return result


@functools.cache
def decoder(name: str) -> Decoder:
    spec = ModelSpec(config=CONFIGS[name], dtype=BF16, device=torch.device("meta"))
    return Decoder.build(spec)


def run(name: str, step_name: str) -> tuple[Recorder, torch.Tensor, torch.Tensor]:
    case = STEPS[step_name]
    token_ids, step = make_step(case, "meta")
    caches = make_caches(decoder(name).spec, case)
    with Recorder() as recorder, DeviceGuard():
        hidden = decoder(name).forward(token_ids, step, caches)
        logits = decoder(name).compute_logits(hidden)
    return recorder, hidden, logits


def expected_results(config: ModelConfig, tokens: int) -> dict[str, list[dict[int, Shape]]]:
    """The results that each operator may give in a step of `tokens` tokens."""
    heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
    chosen, width = config.num_experts_per_tok, config.moe_intermediate_size
    copies, experts = tokens * chosen, config.n_routed_experts
    index_heads = config.index_n_heads
    return {
        "npu_rms_norm": [{0: ((tokens, n), BF16)} for n in (hidden, config.q_lora_rank)],
        "npu_add_rms_norm": [{0: ((tokens, hidden), BF16), 2: ((tokens, hidden), BF16)}],
        "npu_kv_rmsnorm_rope_cache_v2": [{}],
        "npu_scatter_nd_update_": [{}],
        "npu_interleave_rope": [{0: ((tokens, n, 1, 64), BF16)} for n in (heads, index_heads, 1)],
        "npu_lightning_indexer": [{0: ((tokens, 1, config.index_topk), I32)}],
        "npu_transpose_batchmatmul": [
            {0: ((tokens, heads, n), BF16)} for n in (latent, config.v_head_dim)
        ],
        "npu_sparse_flash_attention": [{0: ((tokens, heads, latent), BF16)}],
        "npu_moe_gating_top_k": [{0: ((tokens, chosen), F32), 1: ((tokens, chosen), I32)}],
        "npu_moe_init_routing_v2": [
            {0: ((copies, hidden), BF16), 1: ((copies,), I32), 2: ((experts,), I64)}
        ],
        "npu_grouped_matmul": [{0: ((copies, n), BF16)} for n in (2 * width, hidden)],
        "npu_swiglu": [
            {0: ((rows, n), BF16)}
            for rows, n in (
                (tokens, config.intermediate_size),
                (tokens, width * config.n_shared_experts),
                (copies, width),
            )
        ],
        "npu_moe_token_unpermute": [{0: ((tokens, hidden), BF16)}],
    }


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_passes_the_wheels_shape_functions(name: str, step_name: str) -> None:
    config = CONFIGS[name]
    tokens = sum(STEPS[step_name].query_lens)
    recorder, hidden, logits = run(name, step_name)
    assert (tuple(hidden.shape), hidden.dtype) == ((tokens, config.hidden_size), BF16)
    assert (tuple(logits.shape), logits.dtype) == ((tokens, config.vocab_size), F32)
    expected = expected_results(config, tokens)
    for operator, _, results in recorder.calls:
        unused = UNUSED.get(operator, set())
        got = {
            at: (tuple(result.shape), result.dtype)
            for at, result in enumerate(results)
            if at not in unused
        }
        if operator != "npu_scatter_nd_update_":
            assert got in expected[operator], operator


@pytest.mark.parametrize("name", CONFIGS)
def test_each_kind_of_layer_makes_its_calls(name: str) -> None:
    config = CONFIGS[name]
    layers = range(config.num_hidden_layers)
    full = sum(config.has_indexer(layer) for layer in layers)
    sparse = sum(config.is_sparse(layer) for layer in layers)
    assert 0 < full < len(layers)
    assert 0 < sparse < len(layers)
    calls = Counter(operator for operator, _, _ in run(name, "mixed")[0].calls)
    # The query side is narrower than the device's per-head product takes; nano's values are too.
    per_head = len(layers) if config.v_head_dim % 128 == 0 else 0
    assert calls == {
        "npu_rms_norm": 1 + len(layers),
        "npu_add_rms_norm": 2 * len(layers),
        "npu_kv_rmsnorm_rope_cache_v2": len(layers),
        "npu_interleave_rope": len(layers) + 2 * full,
        "npu_scatter_nd_update_": full,
        "npu_lightning_indexer": full,
        **({"npu_transpose_batchmatmul": per_head} if per_head else {}),
        "npu_sparse_flash_attention": len(layers),
        "npu_moe_gating_top_k": sparse,
        "npu_moe_init_routing_v2": sparse,
        "npu_grouped_matmul": 2 * sparse,
        "npu_swiglu": len(layers) + sparse,
        "npu_moe_token_unpermute": sparse,
    }
    if name.startswith("glm-5.2"):
        assert calls.keys() == SCHEMAS.keys()


def test_both_caches_of_a_layer_are_written_where_attention_reads_them() -> None:
    recorder, _, _ = run("glm-5.2", "mixed")
    writes = [a for n, a, _ in recorder.calls if n == "npu_kv_rmsnorm_rope_cache_v2"]
    reads = [a for n, a, _ in recorder.calls if n == "npu_sparse_flash_attention"]
    for write, read in zip(writes, reads, strict=True):
        assert write["ckv_cache"] is read["key"]
        assert write["ckv_cache"] is read["value"]
        assert write["k_cache"] is read["key_rope"]


def test_a_shared_layer_attends_where_the_last_indexer_pointed() -> None:
    recorder, _, _ = run("glm-5.2", "decode")
    latest: torch.Tensor | None = None
    num_layers = 0
    for operator, arguments, results in recorder.calls:
        if operator == "npu_lightning_indexer":
            latest = results[0]
        elif operator == "npu_sparse_flash_attention":
            assert arguments["sparse_indices"] is latest
            num_layers += 1
    assert num_layers == CONFIGS["glm-5.2"].num_hidden_layers


def test_torch_npu_has_every_other_operator_of_a_step() -> None:
    """Products, views, lookups: what the model takes from torch itself."""
    # Our own products are torch's wherever no CPU kernel of ours is.
    own = {"glm::linear": "aten::mm", "glm::head_matmul": "aten::bmm"}
    others = {own.get(name, name) for name in run("glm-5.2", "mixed")[0].others}
    assert others >= set(own.values())
    assert {"aten::embedding", "aten::native_layer_norm", "aten::copy_"} <= others
    missing = [
        name
        for name in sorted(others)
        if not _has_kernel(name, "PrivateUse1")
        and not _has_kernel(name, "CompositeExplicitAutograd")
    ]
    assert not missing
