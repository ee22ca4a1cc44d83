"""What the NPU's kernels demand of each call, written down once and checked at the call site.

The schemas say which arguments exist; these rules say which shapes, types, layouts and modes the
kernels of an Atlas A2 or A3 take (torch_npu's own documentation and CANN's operator pages). Neither
torch_npu's shape functions nor its dispatcher check them: a wrong layout gives wrong numbers or an
error code without a name. `DeviceGuard` checks every call made inside it, on any device.

A shape is written with one letter per size (see `services.worker.model`) or its number; equal
letters in one call are equal sizes. ``...`` stands for any leading sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import FunctionSchema, Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.ops.form import INDEX, INT32, INT64, WIDE, Form, Sizes
from shared.errors import ConfigError

_HEAD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_EXPERTS = 2048
_INNER_LIMIT = 65536
_BY_HEAD = [1, 0, 2]
_NO_WINDOW = 2**63 - 1

Arguments = Mapping[str, Any]


def _no_limits(arguments: Arguments, sizes: Sizes) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The demands of one operator."""

    tensors: Mapping[str, Form]
    options: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Arguments that may have these values only; the schema's default counts when unset."""
    limits: Callable[[Arguments, Sizes], str] = _no_limits
    """What else is wrong; empty when nothing is. Its docstring states the limits."""


def _attention_limits(arguments: Arguments, sizes: Sizes) -> str:
    """H one of 1, 2, 4 ... 128; K 1 to 2048, or a multiple of 1024 up to 8192."""
    if sizes["H"] not in _HEAD_COUNTS:
        return f"{sizes['H']} heads: must be one of {_HEAD_COUNTS}"
    return _topk_limits(sizes["K"])


def _indexer_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Hi at most 64; sparse_count 1 to 2048, or a multiple of 1024 up to 8192."""
    if sizes["Hi"] > 64:
        return f"{sizes['Hi']} indexer heads: at most 64"
    return _topk_limits(arguments["sparse_count"])


def _topk_limits(count: int) -> str:
    is_wide = count <= 8192 and count % 1024 == 0
    is_right = 1 <= count <= 2048 or is_wide
    return "" if is_right else f"{count} positions: 1 to 2048, or a multiple of 1024 up to 8192"


def _gating_limits(arguments: Arguments, sizes: Sizes) -> str:
    """N at most 2048, above 2 per group; k within the chosen groups."""
    experts, groups = sizes["N"], arguments["group_count"]
    if experts > _MAX_EXPERTS or experts % groups or experts // groups <= 2:
        return f"{experts} experts in {groups} groups: at most {_MAX_EXPERTS}, above 2 per group"
    if not 1 <= arguments["k"] <= experts // groups * arguments["k_group"]:
        return f"k={arguments['k']} must fit in the chosen groups"
    return ""


def _routing_limits(arguments: Arguments, sizes: Sizes) -> str:
    """Active experts within expert_num, which is at most 10240."""
    num_experts = arguments["expert_num"]
    first, last = arguments["active_expert_range"] or (0, num_experts)
    if not 0 <= first < last <= num_experts <= 10240:
        return f"experts {first} to {last} of {num_experts}: must be inside, at most 10240"
    return "" if arguments["active_num"] >= -1 else "active_num must be -1 or more"


def _grouped_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K and N below 65536; G at least 2."""
    if max(sizes["K"], sizes["N"]) >= _INNER_LIMIT:
        return f"rows of {sizes['K']} and {sizes['N']} must be below {_INNER_LIMIT}"
    # Documented for counts: the list's length cannot be 1.
    return "" if sizes["G"] > 1 else "one group: counts need two or more"


def _swiglu_limits(arguments: Arguments, sizes: Sizes) -> str:
    """W even, dim the last."""
    is_last = arguments["dim"] in {-1, arguments["input"].dim() - 1}
    return "" if is_last and sizes["W"] % 2 == 0 else "the last size must be two equal halves"


def _unpermute_limits(arguments: Arguments, sizes: Sizes) -> str:
    """A equals T times k."""
    is_right = sizes["A"] == sizes["T"] * sizes["k"]
    return "" if is_right else "one index for each token and choice"


def takes_batchmatmul(heads: int, inner: int, outer: int) -> bool:
    """Whether the device's per-head product takes [T, heads, inner] by [heads, inner, outer].

    CANN 9 on A2 and A3 wants both sizes of a matrix in steps of 128 (later ones 16), and rows below
    65536 elements. GLM-5.2's absorbed query side, 192 wide, is not among them.
    """
    return inner % 128 == 0 and outer % 128 == 0 and heads * inner < _INNER_LIMIT


def _batchmatmul_limits(arguments: Arguments, sizes: Sizes) -> str:
    """M and N multiples of 128; H times M below 65536."""
    heads, inner, outer = sizes["H"], sizes["M"], sizes["N"]
    if takes_batchmatmul(heads, inner, outer):
        return ""
    return f"{heads} matrices of {inner} by {outer}: steps of 128, rows below {_INNER_LIMIT}"


_LENGTHS = Form("R", INT32, is_flat=True)
_TABLE = Form("R M", INT32, is_flat=True)
_ANGLES = Form("T 1 1 64")

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "npu_add_rms_norm": Rule(
            tensors={"x1": Form("T E", WIDE), "x2": Form("T E", WIDE), "gamma": Form("E", WIDE)}
        ),
        "npu_grouped_matmul": Rule(
            tensors={
                "x": Form("A K"),
                "weight": Form("G K N"),
                "group_list": Form("G", INT64),
            },
            options={
                "split_item": (2, 3),
                "group_type": (0,),
                "group_list_type": (1,),
                "act_type": (0,),
            },
            limits=_grouped_limits,
        ),
        # The torch_npu page wants flat rows here; CANN's takes views, and copies what it must.
        "npu_interleave_rope": Rule(
            tensors={"x": Form("T H 1 64"), "cos": _ANGLES, "sin": _ANGLES}
        ),
        "npu_kv_rmsnorm_rope_cache_v2": Rule(
            tensors={
                "kv": Form("T 1 1 576"),
                "gamma": Form("512"),
                "cos": _ANGLES,
                "sin": _ANGLES,
                "index": Form("T", INT64),
                "k_cache": Form("B 128 1 64", is_flat=True),
                "ckv_cache": Form("B 128 1 512", is_flat=True),
            },
            options={"cache_mode": ("PA",)},
        ),
        "npu_lightning_indexer": Rule(
            tensors={
                "query": Form("T Hi 128", is_flat=True),
                "key": Form("B 128 1 128", is_flat=True),
                "weights": Form("T Hi", is_flat=True),
                "actual_seq_lengths_query": _LENGTHS,
                "actual_seq_lengths_key": _LENGTHS,
                "block_table": _TABLE,
            },
            options={
                "layout_query": ("TND",),
                "layout_key": ("PA_BSND",),
                "sparse_mode": (3,),
                "pre_tokens": (_NO_WINDOW,),
                "next_tokens": (_NO_WINDOW,),
                "return_value": (False,),
            },
            limits=_indexer_limits,
        ),
        "npu_moe_gating_top_k": Rule(
            tensors={"x": Form("T N", WIDE), "bias": Form("N", WIDE)},
            options={
                "group_select_mode": (1,),
                "renorm": (0,),
                "norm_type": (1,),
                "out_flag": (False,),
            },
            limits=_gating_limits,
        ),
        "npu_moe_init_routing_v2": Rule(
            tensors={"x": Form("T E"), "expert_idx": Form("T k", INT32)},
            options={
                "drop_pad_mode": (0,),
                "expert_tokens_num_type": (1,),
                "expert_tokens_num_flag": (True,),
                "quant_mode": (-1,),
                "row_idx_type": (0,),
            },
            limits=_routing_limits,
        ),
        "npu_moe_token_unpermute": Rule(
            tensors={
                "permuted_tokens": Form("A E"),
                # The page says int64, its example and the routing operator's result are int32.
                "sorted_indices": Form("A", INT32),
                "probs": Form("T k"),
            },
            options={"padded_mode": (False,), "restore_shape": (None,)},
            limits=_unpermute_limits,
        ),
        "npu_rms_norm": Rule(tensors={"input": Form("... E", WIDE), "gamma": Form("E", WIDE)}),
        "npu_scatter_nd_update_": Rule(
            tensors={
                "input": Form("A N", WIDE, is_flat=True),
                "indices": Form("T 1", INDEX),
                "updates": Form("T N", WIDE),
            }
        ),
        "npu_sparse_flash_attention": Rule(
            tensors={
                "query": Form("T H 512", is_flat=True),
                "key": Form("B 128 1 512", is_flat=True),
                "value": Form("B 128 1 512", is_flat=True),
                "sparse_indices": Form("T 1 K", INT32, is_flat=True),
                "block_table": _TABLE,
                "actual_seq_lengths_query": _LENGTHS,
                "actual_seq_lengths_kv": _LENGTHS,
                "query_rope": Form("T H 64", is_flat=True),
                "key_rope": Form("B 128 1 64", is_flat=True),
            },
            options={
                "sparse_block_size": (1,),
                "layout_query": ("TND",),
                "layout_kv": ("PA_BSND",),
                "sparse_mode": (0, 3),
                "pre_tokens": (_NO_WINDOW,),
                "next_tokens": (_NO_WINDOW,),
                "attention_mode": (2,),
                "return_softmax_lse": (False,),
            },
            limits=_attention_limits,
        ),
        "npu_swiglu": Rule(tensors={"input": Form("... W", WIDE)}, limits=_swiglu_limits),
        "npu_transpose_batchmatmul": Rule(
            tensors={"input": Form("T H M", WIDE), "weight": Form("H M N", WIDE, is_flat=True)},
            options={
                "perm_x1": (_BY_HEAD,),
                "perm_x2": (None, [0, 1, 2]),
                "perm_y": (_BY_HEAD,),
                "batch_split_factor": (None, 1),
            },
            limits=_batchmatmul_limits,
        ),
    }
)


def find_violation(name: str, arguments: Arguments) -> str:
    """What the kernel of `name` would refuse in a call; empty when it takes the call."""
    rule = RULES.get(name)
    if rule is None:
        return "no rule is written down for this operator"
    sizes: dict[str, int] = {}
    types: set[torch.dtype] = set()
    for argument, value in arguments.items():
        form = rule.tensors.get(argument)
        if form is not None:
            reason = form.find_violation(_single(value), sizes, types)
        elif argument in rule.options:
            reason = _option_violation(value, rule.options[argument])
        else:
            reason = "this version passes no tensor here" if _has_tensor(value) else ""
        if reason:
            return f"{argument}: {reason}"
    return rule.limits(arguments, sizes)


def _single(value: object) -> object:
    """The tensor of an argument that is a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _has_tensor(value: object) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, Tensor) for entry in entries)


def _option_violation(value: object, allowed: Sequence[object]) -> str:
    return "" if value in allowed else f"{value!r} must be one of {list(allowed)}"


class DeviceGuard(TorchDispatchMode):
    """Inside it, a call that an NPU's kernel would refuse or misread is a `ConfigError`."""

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Check one call, then make it."""
        named = kwargs or {}
        if func.namespace == "npu":
            name = func._schema.name.removeprefix("npu::")
            reason = find_violation(name, bind(func._schema, args, named))
            if reason:
                raise ConfigError(f"{name}: {reason}")
        return func(*args, **named)


def bind(
    schema: FunctionSchema, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Every argument of a call by its name, defaults included."""
    bound: dict[str, object] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        else:
            bound[argument.name] = kwargs.get(argument.name, argument.default_value)
    return bound
