"""Demands of the fused exchange of experts' tokens, the same on all ranks for both operators.

Limits on an A2's ranks (16 and more) and on its experts per rank are where the method is chosen.
"""

from types import MappingProxyType

import torch

from services.worker.ops.form import INT32, SCALE, Form, Kind, Sizes
from services.worker.ops.rules.rule import Arguments, Rule, Rules

_MAX_TOKENS = 512
_MAX_CHOICES = 16
_MAX_NAME = 127
_MASK = Kind("bool", (torch.bool,))

_ALONE = MappingProxyType(
    {
        # No experts that are only shared, no groups inside the group, no special experts.
        "group_tp": ("",),
        "tp_world_size": (0,),
        "expert_shard_type": (0,),
        "shared_expert_num": (1,),
        "shared_expert_rank_num": (0,),
        "global_bs": (0,),
        "comm_alg": ("",),
        "zero_expert_num": (0,),
        "copy_expert_num": (0,),
        "const_expert_num": (0,),
    }
)


def _limits(arguments: Arguments, sizes: Sizes) -> str:
    """T at most 512, E 1024 to 8192, k at most 16; experts a multiple of ranks."""
    experts, ranks = arguments["moe_expert_num"], arguments["ep_world_size"]
    if not 0 <= arguments["ep_rank_id"] < ranks or ranks < 2 or experts % ranks:
        return f"{experts} experts on {ranks} ranks, this one {arguments['ep_rank_id']}"
    if not 1 <= sizes["T"] <= _MAX_TOKENS:
        return f"{sizes['T']} tokens of a rank must be at most {_MAX_TOKENS}"
    if not 1024 <= sizes["E"] <= 8192:
        return f"rows of {sizes['E']} must be 1024 to 8192 wide"
    if not 1 <= sizes["k"] <= min(_MAX_CHOICES, experts):
        return f"{sizes['k']} choices must be at most {_MAX_CHOICES}"
    if not 1 <= len(arguments["group_ep"]) <= _MAX_NAME:
        return f"group_ep: a name of {len(arguments['group_ep'])} characters"
    return ""


RULES: Rules = MappingProxyType(
    {
        "npu_moe_distribute_dispatch_v2": (
            Rule(
                tensors={
                    "x": Form("T E"),
                    "expert_ids": Form("T k", INT32),
                    "x_active_mask": Form("T", _MASK),
                    "expert_scales": Form("T k", SCALE),
                },
                options={**_ALONE, "quant_mode": (0, 2), "expert_token_nums_type": (1,)},
                limits=_limits,
                case="with weights, as an A2 wants",
                applies=lambda arguments: arguments["expert_scales"] is not None,
            ),
            Rule(
                tensors={
                    "x": Form("T E"),
                    "expert_ids": Form("T k", INT32),
                    "x_active_mask": Form("T", _MASK),
                },
                options={**_ALONE, "quant_mode": (0, 2), "expert_token_nums_type": (1,)},
                limits=_limits,
                case="without them",
            ),
        ),
        "npu_moe_distribute_combine_v2": (
            Rule(
                tensors={
                    "expand_x": Form("A E"),
                    "expert_ids": Form("T k", INT32),
                    "assist_info_for_combine": Form("I", INT32),
                    "ep_send_counts": Form("S", INT32),
                    "expert_scales": Form("T k", SCALE),
                    "tp_send_counts": Form("P", INT32),
                    "x_active_mask": Form("T", _MASK),
                    "expand_scales": Form("A", SCALE),
                },
                options={**_ALONE, "comm_quant_mode": (0,)},
                limits=_limits,
                case="with weights, as an A2 wants",
                applies=lambda arguments: arguments["expand_scales"] is not None,
            ),
            Rule(
                tensors={
                    "expand_x": Form("A E"),
                    "expert_ids": Form("T k", INT32),
                    "assist_info_for_combine": Form("I", INT32),
                    "ep_send_counts": Form("S", INT32),
                    "expert_scales": Form("T k", SCALE),
                    "tp_send_counts": Form("P", INT32),
                    "x_active_mask": Form("T", _MASK),
                },
                options={**_ALONE, "comm_quant_mode": (0,)},
                limits=_limits,
                case="without them",
            ),
        ),
    }
)
