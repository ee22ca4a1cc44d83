"""Where the wheel's shape functions are wrong or check nothing, by name, and what stands in.

A test here that fails after a new version of torch_npu is good news: the gap is closed and its
entry can go.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_npu.npu._backends import get_soc_version
from torch_npu.op_plugin.meta import _meta_registrations

from services.worker.ops.device_rules import DeviceGuard
from shared.errors import ConfigError

BF16, INT32 = torch.bfloat16, torch.int32


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attend(**changes: Any) -> Any:
    cache = meta(5, 128, 1, 512)
    named = {
        "block_table": meta(2, 9, dtype=INT32),
        "actual_seq_lengths_query": meta(2, dtype=INT32),
        "actual_seq_lengths_kv": meta(2, dtype=INT32),
        "query_rope": meta(3, 8, 64),
        "key_rope": meta(5, 128, 1, 64),
        "layout_query": "TND",
        "layout_kv": "PA_BSND",
        "attention_mode": 2,
    }
    indices = meta(3, 1, 16, dtype=INT32)
    return torch.ops.npu.npu_sparse_flash_attention(
        meta(3, 8, 512), cache, cache, indices, 0.1, **(named | changes)
    )


def write(**changes: Any) -> Any:
    named = {
        "kv": meta(3, 1, 1, 576),
        "gamma": meta(512),
        "cos": meta(3, 1, 1, 64),
        "sin": meta(3, 1, 1, 64),
        "index": meta(3, dtype=torch.int64),
        "k_cache": meta(5, 128, 1, 64),
        "ckv_cache": meta(5, 128, 1, 512),
        "cache_mode": "PA",
    }
    return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(**(named | changes))


def test_the_lse_of_the_paged_attention_has_a_wrong_shape_in_the_wheel() -> None:
    """It reads the block size as the number of KV heads: 128 by 3 by 8 // 128."""
    assert attend(return_softmax_lse=True)[1].shape == (128, 3, 0)
    with DeviceGuard(), pytest.raises(ConfigError, match="return_softmax_lse"):
        attend(return_softmax_lse=True)


@pytest.mark.parametrize(
    ("call", "changes", "reason"),
    [
        (attend, {"attention_mode": 0}, "attention_mode"),  # the default, which no kernel takes
        (attend, {"layout_kv": "BSND"}, "layout_kv"),
        (attend, {"block_table": meta(2, 9, dtype=torch.int64)}, "block_table"),
        (attend, {"query_rope": meta(3, 8, 65)}, "query_rope"),
        (attend, {"key_rope": meta(5, 128, 1, 64, dtype=torch.float16)}, "key_rope"),
        (write, {"cache_mode": "Norm"}, "cache_mode"),  # the default: a cache without pages
        (write, {"index": meta(3, dtype=INT32)}, "index"),
        (write, {"k_cache": meta(5, 128, 1, 512), "ckv_cache": meta(5, 128, 1, 64)}, "k_cache"),
    ],
)
def test_what_the_wheel_lets_pass_the_guard_refuses(
    call: Any, changes: dict[str, Any], reason: str
) -> None:
    call(**changes)
    with DeviceGuard(), pytest.raises(ConfigError, match=reason):
        call(**changes)


def test_operators_without_any_check_in_the_wheel_have_the_guards() -> None:
    wrong = {
        "npu_scatter_nd_update_": (meta(9, 8), meta(2, 2), meta(5)),
        "npu_interleave_rope": (meta(3), meta(1), meta(7)),
        "npu_rms_norm": (meta(3, 8), meta(9)),
    }
    for name, arguments in wrong.items():
        operator = getattr(torch.ops.npu, name)
        operator(*arguments)
        with DeviceGuard(), pytest.raises(ConfigError, match=name):
            operator(*arguments)


def test_a_change_of_layout_has_no_shape_function_in_the_wheel() -> None:
    """Ours stands in, so that models with quantized weights can be built on meta tensors."""
    assert '"npu_format_cast"' not in Path(_meta_registrations.__file__).read_text("utf-8")
    weight = meta(4, 64, 48, dtype=torch.int8)
    cast = torch.ops.npu.npu_format_cast(weight, 29)
    assert (cast.shape, cast.dtype) == (weight.shape, weight.dtype)


def test_a_shape_function_asks_the_device_which_chip_it_is() -> None:
    """Without one it fails; under the plugin all of them see an A2."""
    with pytest.raises(RuntimeError):
        get_soc_version()
    assert _meta_registrations.get_soc_version() < 260  # the number of an A5
