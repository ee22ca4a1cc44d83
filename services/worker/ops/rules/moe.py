"""Demands of the expert family: choice, sorting, grouped products, sum.

The quantized products are in `services.worker.ops.rules.moe_quant`.
"""

from types import MappingProxyType

from services.worker.ops.form import INT8, INT32, INT64, SCALE, WIDE, Form, Sizes
from services.worker.ops.rules import moe_quant
from services.worker.ops.rules.rule import INNER_LIMIT, Arguments, Rule, Rules

_MAX_EXPERTS = 2048


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


def _sorts_int8(arguments: Arguments) -> bool:
    return arguments["scale"] is not None


def _sorts_and_quantizes(arguments: Arguments) -> bool:
    return bool(arguments["quant_mode"] == 1)


_SORTING = MappingProxyType(
    {
        "drop_pad_mode": (0,),
        "expert_tokens_num_type": (1,),
        "expert_tokens_num_flag": (True,),
        "row_idx_type": (0,),
    }
)


def _grouped_limits(arguments: Arguments, sizes: Sizes) -> str:
    """K and N below 65536; G at least 2."""
    if max(sizes["K"], sizes["N"]) >= INNER_LIMIT:
        return f"rows of {sizes['K']} and {sizes['N']} must be below {INNER_LIMIT}"
    # Documented for counts: the list's length cannot be 1.
    return "" if sizes["G"] > 1 else "one group: counts need two or more"


def _unpermute_limits(arguments: Arguments, sizes: Sizes) -> str:
    """A equals T times k."""
    is_right = sizes["A"] == sizes["T"] * sizes["k"]
    return "" if is_right else "one index for each token and choice"


RULES: Rules = MappingProxyType(
    {
        **moe_quant.RULES,
        "npu_grouped_matmul": (
            Rule(
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
                case="plain",
                applies=moe_quant.is_plain,
            ),
            *moe_quant.GROUPED,
        ),
        "npu_moe_gating_top_k": (
            Rule(
                tensors={"x": Form("T N", WIDE), "bias": Form("N", WIDE)},
                options={
                    "group_select_mode": (1,),
                    "renorm": (0,),
                    "norm_type": (1,),
                    "out_flag": (False,),
                },
                limits=_gating_limits,
            ),
        ),
        "npu_moe_init_routing_v2": (
            Rule(
                tensors={
                    "x": Form("T E", INT8),
                    "expert_idx": Form("T k", INT32),
                    "scale": Form("T", SCALE),
                },
                options={**_SORTING, "quant_mode": (-1,)},
                limits=_routing_limits,
                case="rows that are int8 already",
                applies=_sorts_int8,
            ),
            Rule(
                # Without smoothing factors; an int8 x gives undefined results in this mode.
                tensors={"x": Form("T E", WIDE), "expert_idx": Form("T k", INT32)},
                options=_SORTING,
                limits=_routing_limits,
                case="quantized on the way",
                applies=_sorts_and_quantizes,
            ),
            Rule(
                tensors={"x": Form("T E"), "expert_idx": Form("T k", INT32)},
                options={**_SORTING, "quant_mode": (-1,)},
                limits=_routing_limits,
                case="plain",
            ),
        ),
        "npu_moe_token_unpermute": (
            Rule(
                tensors={
                    "permuted_tokens": Form("A E"),
                    # The page says int64, its example and the routing operator's result are int32.
                    "sorted_indices": Form("A", INT32),
                    "probs": Form("T k"),
                },
                options={"padded_mode": (False,), "restore_shape": (None,)},
                limits=_unpermute_limits,
            ),
        ),
    }
)
