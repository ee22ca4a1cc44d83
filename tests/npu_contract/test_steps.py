"""Whole steps of every variant on meta tensors, through torch_npu's own shape functions."""

import functools
from collections import Counter

import pytest
import torch

from services.worker.model.decoder import Decoder
from services.worker.ops.nz import is_nz
from services.worker.ops.schemas import SCHEMAS
from services.worker.parallel.moe_method import MoeMethod
from tools.npu_contract.cases import STEPS
from tools.npu_contract.drive import Run, build, drive
from tools.npu_contract.shapes import StepShapes, find_wrong_shape
from tools.npu_contract.variants import VARIANTS

BF16, F32 = torch.bfloat16, torch.float32


@functools.cache
def built(name: str) -> tuple[Decoder, Run]:
    loading = Run()
    return build(VARIANTS[name], loading), loading


@functools.cache
def run(name: str, step_name: str) -> Run:
    return drive(built(name)[0], VARIANTS[name], STEPS[step_name])


def size_of(shape: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(shape.shape), shape.dtype


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_passes_the_wheels_shape_functions(name: str, step_name: str) -> None:
    decoder, tokens = built(name)[0], sum(STEPS[step_name].query_lens)
    spec = decoder.spec
    found = run(name, step_name)
    hidden = ((tokens, spec.config.hidden_size), BF16)
    logits = ((tokens, spec.config.vocab_size), F32)
    due = {"hidden": hidden}
    due |= {"logits": logits} if decoder.lm_head else {}
    due |= {"draft hidden": hidden, "draft logits": logits} if decoder.mtp else {}
    assert {output: size_of(tensor) for output, tensor in found.outputs.items()} == due
    expected = StepShapes(spec, VARIANTS[name].method, tokens).expected()
    for call in found.calls:
        if call.operator == "npu_scatter_nd_update_":
            assert size_of(call.results[0]) == size_of(call.arguments["input"])
        else:
            assert find_wrong_shape(expected, call.operator, call.results) == ""


def test_together_the_variants_make_every_call() -> None:
    called = {call.operator for name in VARIANTS for call in built(name)[1].calls}
    called |= {call.operator for name in VARIANTS for call in run(name, "decode").calls}
    assert called == SCHEMAS.keys()


def counted(name: str) -> Counter[str]:
    return Counter(call.operator for call in run(name, "mixed").calls)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].weights == "bf16"])
def test_each_kind_of_layer_makes_its_calls(name: str) -> None:
    decoder, method = built(name)[0], VARIANTS[name].method
    spec, has_mtp = decoder.spec, decoder.mtp is not None
    config, cache, place = spec.config, spec.cache, spec.placement
    # The MTP layer is one more that selects for itself and has experts; it has three norms more.
    layers = [*place.layers(config), *([config.num_hidden_layers] if has_mtp else [])]
    full = sum(config.has_indexer(layer) for layer in layers)
    sparse = sum(config.is_sparse(layer) for layer in layers)
    assert full
    assert sparse
    # The query side is narrower than the device's per-head product takes; nano's values are too.
    per_head = len(layers) if config.v_head_dim % 128 == 0 else 0
    packed, eight = len(layers) * cache.sparse_sfa_c8, full * cache.sparse_li_c8
    # Rows that travel before they are written are finished by operators of their own.
    apart = (len(layers) - packed) * place.is_dsa_cp
    is_first, is_last = place.is_first_stage(), place.is_last_stage(config)
    fused = sparse * (method is MoeMethod.MC2)
    due = Counter(
        {
            # The first norm of model and MTP layer has no sum before it; both inputs of the MTP
            # layer are normalised, and the query latents of every layer.
            "npu_rms_norm": is_first + 3 * has_mtp + len(layers) + packed + apart,
            "npu_add_rms_norm": 2 * len(layers) - is_first + is_last,
            "npu_kv_rmsnorm_rope_cache_v2": len(layers) - packed - apart,
            "npu_dynamic_block_quant": packed,
            "npu_interleave_rope": len(layers) + packed + apart + 2 * full,
            "npu_scatter_nd_update_": packed + 2 * apart + full + eight,
            "npu_lightning_indexer": full - eight,
            "npu_quant_lightning_indexer": eight,
            "npu_dynamic_quant": 2 * eight,  # keys, and queries
            "npu_transpose_batchmatmul": per_head,
            "npu_sparse_flash_attention": len(layers) - packed,
            "npu_kv_quant_sparse_flash_attention": packed,
            "npu_moe_gating_top_k": sparse,
            # What arrives from other ranks is sorted once more.
            "npu_moe_init_routing_v2": sparse * (1 + (method is MoeMethod.ALLTOALL)) - fused,
            "npu_moe_distribute_dispatch_v2": fused,
            "npu_grouped_matmul": 2 * sparse,
            "npu_swiglu": len(layers) + sparse,
            "npu_moe_token_unpermute": sparse - fused,
            "npu_moe_distribute_combine_v2": fused,
        }
    )
    assert counted(name) == +due


def named(weights: str, nz: int = 1) -> str:
    """A variant of GLM-5.2 whose ranks share the experts' width."""
    return next(
        name
        for name, variant in VARIANTS.items()
        if (variant.model, variant.weights, variant.weight_nz_mode) == ("glm-5.2", weights, nz)
        and variant.place == "TP8"
    )


@pytest.mark.parametrize(
    ("weights", "nz", "due"),
    [
        # 9 layers, the last float; 3 dense, 6 sparse; 4 of 8 with an indexer.
        ("w8a8", 1, {"npu_quantize": 3 * 8 + 4, "npu_grouped_matmul_swiglu_quant_v2": 5}),
        ("w8a8", 0, {"npu_grouped_matmul_swiglu_quant_v2": 0}),
        ("w8a8 dynamic", 1, {"npu_quantize": 0, "npu_dequant_swiglu_quant": 8}),
        ("w8a8 dynamic", 0, {"npu_dequant_swiglu_quant": 8 + 5, "npu_grouped_matmul": 10 + 2}),
        ("w4a8", 1, {"npu_quantize": 0, "npu_grouped_matmul_swiglu_quant_v2": 5}),
    ],
)
def test_quantized_products_go_to_the_operators_of_their_scheme(
    weights: str, nz: int, due: dict[str, int]
) -> None:
    found = counted(named(weights, nz))
    assert {operator: found[operator] for operator in due} == due


@pytest.mark.parametrize("nz", [0, 1])
@pytest.mark.parametrize("weights", ["w8a8", "w8a8 dynamic", "w4a8"])
def test_quantized_weights_are_blocked_where_that_is_asked_for(weights: str, nz: int) -> None:
    name = named(weights, nz)
    is_asked = bool(nz)
    assert bool(built(name)[1].calls) is is_asked  # casts, while loading
    num_weights = 0
    for call in run(name, "decode").calls:
        weight = call.arguments.get("x2", call.arguments.get("weight"))
        for tensor in weight if isinstance(weight, list) else [weight]:
            if tensor is not None and not tensor.is_floating_point():
                assert is_nz(tensor) is is_asked, call.operator
                num_weights += 1
    assert num_weights > 40


PLAIN = "glm-5.2, bf16 weights, bf16 caches, whole"
C8_CACHES = [name for name, variant in VARIANTS.items() if variant.caches.startswith("C8")]


def test_both_caches_of_a_layer_are_written_where_attention_reads_them() -> None:
    calls = run(PLAIN, "mixed").calls
    writes = [c.arguments for c in calls if c.operator == "npu_kv_rmsnorm_rope_cache_v2"]
    reads = [c.arguments for c in calls if c.operator == "npu_sparse_flash_attention"]
    for write, read in zip(writes, reads, strict=True):
        assert write["ckv_cache"] is read["key"]
        assert write["ckv_cache"] is read["value"]
        assert write["k_cache"] is read["key_rope"]


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("name", C8_CACHES)
def test_8_bit_caches_are_written_where_they_are_read(name: str) -> None:
    """Rows, keys and scales of a layer, each before its reader runs."""
    written: list[torch.Tensor] = []
    num_reads = 0
    for call in run(name, "mixed").calls:
        arguments = call.arguments
        if call.operator == "npu_scatter_nd_update_":
            written.append(arguments["input"])
        elif call.operator == "npu_kv_quant_sparse_flash_attention":
            assert any(is_same_memory(arguments["key"], cache) for cache in written)
            assert arguments["key"] is arguments["value"]
            written, num_reads = [], num_reads + 1
        elif call.operator == "npu_quant_lightning_indexer":
            for cached in ("key", "key_dequant_scale"):
                assert any(is_same_memory(arguments[cached], cache) for cache in written), cached
    assert num_reads == len(built(name)[0].layers) + 1


def test_only_the_layers_that_a_description_names_have_8_bit_keys() -> None:
    found = counted("glm-5.2, w8a8 weights, LI C8 in layer 1 caches, TP8")
    assert found["npu_quant_lightning_indexer"] == 1
    assert found["npu_lightning_indexer"] == 4


@pytest.mark.parametrize("name", [PLAIN, *C8_CACHES])
def test_a_shared_layer_attends_where_the_last_indexer_pointed(name: str) -> None:
    latest: torch.Tensor | None = None
    num_layers = 0
    for call in run(name, "decode").calls:
        if call.operator in {"npu_lightning_indexer", "npu_quant_lightning_indexer"}:
            latest = call.results[0]
        elif call.operator.endswith("sparse_flash_attention"):
            assert call.arguments["sparse_indices"] is latest
            num_layers += 1
    assert num_layers == len(built(name)[0].layers) + 1


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_npu_has_every_other_operator_of_loading_and_of_a_step(name: str) -> None:
    """Products, views, lookups: what the model takes from torch itself."""
    # Our own products are torch's wherever no CPU kernel of ours is.
    own = {"glm::linear": "aten::mm", "glm::head_matmul": "aten::bmm"}
    others = {own.get(other, other) for other in run(name, "mixed").others}
    assert {"aten::mm", "aten::bmm", "aten::copy_"} <= others
    others |= built(name)[1].others
    keys = ("PrivateUse1", "CompositeExplicitAutograd")
    missing = [other for other in sorted(others) if not any(has_kernel(other, k) for k in keys)]
    assert not missing
