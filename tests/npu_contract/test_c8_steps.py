"""Steps on 8-bit caches go through the wheel's shape functions and the rules of the device."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.kv_cache import check_layout
from services.worker.model.cache_format import CacheFormat
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import DeviceGuard, bind
from tools.npu_contract.cases import STEPS, make_caches, make_step, model_configs

BF16 = torch.bfloat16
CONFIGS = model_configs()
FORMATS = {
    "sfa": CacheFormat(sparse_sfa_c8=True),
    "li": CacheFormat(sparse_li_c8=True),
    "both": CacheFormat(sparse_sfa_c8=True, sparse_li_c8=True),
    "both on A5": CacheFormat(sparse_sfa_c8=True, sparse_li_c8=True, generation="a5"),
}
Calls = list[tuple[str, dict[str, Any], list[torch.Tensor]]]


class Recorder(TorchDispatchMode):
    """Every device operator of a step with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        if func.namespace == "npu":
            name = func._schema.name.removeprefix("npu::")
            results = [result] if isinstance(result, torch.Tensor) else list(result)
            self.calls.append((name, bind(func._schema, args, named), results))
        else:
            self.others.add(func.name())
        return result


@functools.cache
def decoder(name: str, form: str) -> Decoder:
    device = torch.device("meta")
    return Decoder.build(
        ModelSpec(config=CONFIGS[name], dtype=BF16, device=device, cache=FORMATS[form])
    )


@functools.cache
def run(name: str, form: str, step_name: str) -> tuple[Recorder, torch.Tensor]:
    model, case = decoder(name, form), STEPS[step_name]
    token_ids, step = make_step(case, "meta")
    caches = make_caches(model.spec, case)
    check_layout(model.spec, caches)
    with Recorder() as recorder, DeviceGuard():
        hidden = model.forward(token_ids, step, caches)
    return recorder, hidden


@pytest.mark.parametrize("step_name", STEPS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["glm-nano", "glm-5.2", "glm-5.2 TP8 heads"])
def test_a_step_passes_the_wheels_shape_functions(name: str, form: str, step_name: str) -> None:
    config, cache = CONFIGS[name], FORMATS[form]
    tokens = sum(STEPS[step_name].query_lens)
    recorder, hidden = run(name, form, step_name)
    assert (tuple(hidden.shape), hidden.dtype) == ((tokens, config.hidden_size), BF16)
    heads, eight = config.num_attention_heads, cache.eight_bit_type
    expected = {
        "npu_dynamic_block_quant": [
            [((tokens, 1, 512), eight), ((tokens, 1, 4), torch.float32)],
        ],
        "npu_dynamic_quant": [
            [((rows, 128), eight), ((rows,), torch.float32)]
            for rows in (tokens, tokens * config.index_n_heads)
        ],
        "npu_quant_lightning_indexer": [[((tokens, 1, config.index_topk), torch.int32)]],
        "npu_kv_quant_sparse_flash_attention": [[((tokens, heads, 512), BF16)]],
    }
    for operator, _, results in recorder.calls:
        if operator in expected:
            got = [(tuple(result.shape), result.dtype) for result in results]
            assert got in expected[operator], operator


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_makes_its_calls_and_no_others(form: str) -> None:
    config, cache = CONFIGS["glm-5.2"], FORMATS[form]
    layers = config.num_hidden_layers
    full = sum(config.has_indexer(layer) for layer in range(layers))
    packed, eight = layers * cache.sparse_sfa_c8, full * cache.sparse_li_c8
    calls = Counter(operator for operator, _, _ in run("glm-5.2", form, "mixed")[0].calls)
    assert calls["npu_kv_rmsnorm_rope_cache_v2"] == layers - packed
    assert calls["npu_sparse_flash_attention"] == layers - packed
    assert calls["npu_dynamic_block_quant"] == packed
    assert calls["npu_kv_quant_sparse_flash_attention"] == packed
    assert calls["npu_lightning_indexer"] == full - eight
    assert calls["npu_quant_lightning_indexer"] == eight
    assert calls["npu_dynamic_quant"] == 2 * eight  # keys, and queries
    assert calls["npu_scatter_nd_update_"] == packed + full + eight
    assert calls["npu_interleave_rope"] == layers + packed + 2 * full
    assert calls["npu_rms_norm"] == 1 + layers + packed


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@pytest.mark.parametrize("form", ["both", "both on A5"])
def test_what_is_written_is_what_is_read(form: str) -> None:
    """Rows, keys and scales of a layer, each written once before its reader runs."""
    written: list[torch.Tensor] = []
    num_reads = 0
    for operator, arguments, _ in run("glm-5.2", form, "mixed")[0].calls:
        if operator == "npu_scatter_nd_update_":
            written.append(arguments["input"])
        elif operator == "npu_kv_quant_sparse_flash_attention":
            assert any(same_memory(arguments["key"], cache) for cache in written)
            assert arguments["key"] is arguments["value"]
            written, num_reads = [], num_reads + 1
        elif operator == "npu_quant_lightning_indexer":
            for name in ("key", "key_dequant_scale"):
                assert any(same_memory(arguments[name], cache) for cache in written), name
    assert num_reads == CONFIGS["glm-5.2"].num_hidden_layers


@pytest.mark.parametrize("form", FORMATS)
def test_torch_npu_has_every_other_operator_of_a_step(form: str) -> None:
    own = {"glm::linear": "aten::mm", "glm::head_matmul": "aten::bmm"}
    others = {own.get(name, name) for name in run("glm-5.2", form, "mixed")[0].others}
    missing = [
        name
        for name in sorted(others)
        if not any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            for key in ("PrivateUse1", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        )
    ]
    assert not missing
