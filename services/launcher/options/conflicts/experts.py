"""Conflicts of routed and shared experts: where they stand and how tokens reach them."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Conflict, Outcome

_FUSED = "additional_config.enable_fused_mc2"
_HIERARCHY = "additional_config.enable_mc2_hierarchy_comm"
_OVERLAP = "additional_config.multistream_overlap_shared_expert"
_DYNAMIC = "additional_config.eplb_config.dynamic_eplb"
_REDUNDANT = "additional_config.eplb_config.num_redundant_experts"
_SHARED_DP = "additional_config.enable_shared_expert_dp"
_EP = "enable_expert_parallel"
_CONFIG = "vllm-ascend ascend_config.py"
_SELECTION = "vllm-ascend ascend_forward_context.py"
_MEGA_ONLY = "the fused operator does so only as MegaMoE, not as dispatch_ffn_combine"


def _num_experts(asked: Deployment) -> int:
    eplb = asked.flags.additional_config.eplb_config
    redundant = eplb.num_redundant_experts if eplb.dynamic_eplb else 0
    return (asked.model.n_routed_experts or 0) + redundant


def _is_fused(asked: Deployment) -> bool:
    return asked.flags.additional_config.enable_fused_mc2 == 1


def _fits_no_fused_operator(asked: Deployment) -> bool:
    """Bounds of the MegaMoE operator."""
    hidden, width = asked.model.hidden_size, asked.model.moe_intermediate_size
    if not _is_fused(asked) or hidden is None or width is None:
        return False
    fits = 1024 <= hidden <= 8192 and hidden % 512 == 0
    return not (fits and 1024 <= width <= 3072 and width % 512 == 0)


SPREAD: Final = (
    Conflict(
        key="ep-dense-model",
        names=(_EP, "model.n_routed_experts"),
        holds=lambda asked: (
            asked.flags.enable_expert_parallel
            and asked.model.is_known
            and not asked.model.n_routed_experts
        ),
        outcome=Outcome.REFUSE,
        text="the checkpoint has no experts",
        source="vLLM config/model.py",
    ),
    Conflict(
        key="ep-uneven",
        names=(
            _EP,
            "data_parallel_size",
            "tensor_parallel_size",
            "model.n_routed_experts",
            _REDUNDANT,
        ),
        holds=lambda asked: (
            bool(asked.model.n_routed_experts) and _num_experts(asked) % asked.ep_size != 0
        ),
        outcome=Outcome.REFUSE,
        text="experts and their copies must divide over the ranks of all replicas",
        source="vLLM model_executor/layers/fused_moe",
    ),
    Conflict(
        key="eplb-runner",
        names=("enable_eplb", "additional_config.eplb_config"),
        holds=lambda asked: asked.flags.enable_eplb,
        outcome=Outcome.REFUSE,
        text="on Ascend experts are moved by eplb_config with dynamic_eplb",
        source="vllm-ascend platform.py",
    ),
    Conflict(
        key="eplb-ep",
        names=(_DYNAMIC, _EP),
        holds=lambda asked: (
            asked.flags.additional_config.eplb_config.dynamic_eplb
            and not asked.flags.enable_expert_parallel
        ),
        outcome=Outcome.REFUSE,
        text="only experts that are spread can be moved",
        source="vLLM config/parallel.py",
    ),
    Conflict(
        key="eplb-variable",
        names=(_DYNAMIC, "environment.DYNAMIC_EPLB", "environment.EXPERT_MAP_RECORD"),
        holds=lambda asked: (
            asked.flags.additional_config.eplb_config.dynamic_eplb
            and not asked.environment.DYNAMIC_EPLB
            and not asked.environment.EXPERT_MAP_RECORD
        ),
        outcome=Outcome.REFUSE,
        text="one of the two variables has to be true",
        source=_CONFIG,
    ),
    Conflict(
        key="eplb-filter",
        names=("enable_ep_weight_filter", _DYNAMIC),
        holds=lambda asked: (
            asked.flags.enable_ep_weight_filter
            and asked.flags.additional_config.eplb_config.dynamic_eplb
        ),
        outcome=Outcome.SWITCH_OFF,
        text="experts that move may come to any rank",
        source="vLLM model_executor/model_loader",
    ),
    Conflict(
        key="shared-dp-ep",
        names=(_SHARED_DP, _EP, "tensor_parallel_size"),
        holds=lambda asked: (
            asked.flags.additional_config.enable_shared_expert_dp
            and not (asked.flags.enable_expert_parallel and asked.flags.tensor_parallel_size > 1)
        ),
        outcome=Outcome.SWITCH_OFF,
        text="it needs spread experts and several ranks of a layer",
        source=_CONFIG,
    ),
    Conflict(
        key="mix-shared-dp",
        names=("additional_config.mix_placement", _SHARED_DP),
        holds=lambda asked: (
            asked.flags.additional_config.mix_placement
            and asked.flags.additional_config.enable_shared_expert_dp
        ),
        outcome=Outcome.REFUSE,
        text="the shared expert is routed like the others, or stands on every rank",
        source=_CONFIG,
    ),
    Conflict(
        key="mix-overlap",
        names=("additional_config.mix_placement", _OVERLAP),
        holds=lambda asked: (
            asked.flags.additional_config.mix_placement
            and asked.flags.additional_config.multistream_overlap_shared_expert
        ),
        outcome=Outcome.REFUSE,
        text="a shared expert that is routed like the others has no stream of its own",
        source=_CONFIG,
    ),
    Conflict(
        key="flashcomm-o-proj",
        names=("additional_config.enable_flashcomm1", "additional_config.layer_sharding"),
        holds=lambda asked: (
            asked.flags.additional_config.enable_flashcomm1
            and "o_proj" in asked.flags.additional_config.layer_sharding
        ),
        outcome=Outcome.REFUSE,
        text="layer_sharding must not list o_proj",
        source="GLM-5.2 guide, 9.2",
    ),
)

DISPATCH: Final = (
    Conflict(
        key="fused-hierarchy",
        names=(_FUSED, _HIERARCHY),
        holds=lambda asked: (
            _is_fused(asked) and asked.flags.additional_config.enable_mc2_hierarchy_comm
        ),
        outcome=Outcome.REFUSE,
        text="the fused operator has no dispatch in two steps",
        source=_CONFIG,
    ),
    Conflict(
        key="hierarchy-experts",
        names=(_HIERARCHY, "model.n_routed_experts", _REDUNDANT),
        holds=lambda asked: (
            asked.flags.additional_config.enable_mc2_hierarchy_comm and _num_experts(asked) > 512
        ),
        outcome=Outcome.REFUSE,
        text="dispatch in two steps knows at most 512 experts, copies included",
        source=_CONFIG,
    ),
    Conflict(
        key="fused-overlap",
        names=(_OVERLAP, _FUSED),
        holds=lambda asked: (
            _is_fused(asked) and asked.flags.additional_config.multistream_overlap_shared_expert
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the fused operator leaves nothing to overlap with",
        source=_CONFIG,
    ),
    Conflict(
        key="fused-shapes",
        names=(_FUSED, "model.hidden_size", "model.moe_intermediate_size"),
        holds=_fits_no_fused_operator,
        outcome=Outcome.SWITCH_OFF,
        text="the fused operator takes hidden sizes of 1024 to 8192 and expert widths of 1024 to "
        "3072, both multiples of 512",
        source=_CONFIG,
        becomes=0,
    ),
    Conflict(
        key="fused-eplb",
        names=(_FUSED, _DYNAMIC),
        holds=lambda asked: (
            _is_fused(asked) and asked.flags.additional_config.eplb_config.dynamic_eplb
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the fused operator knows no moved experts",
        source="GLM-5.2 guide, 9.2",
        becomes=0,
    ),
    Conflict(
        key="fused-ranks",
        names=(_FUSED, _EP, "data_parallel_size", "tensor_parallel_size"),
        holds=lambda asked: _is_fused(asked) and asked.ep_size > 64,
        outcome=Outcome.SWITCH_OFF,
        text="the fused operator joins at most 64 ranks",
        source=_SELECTION,
        becomes=0,
    ),
    Conflict(
        key="fused-many-ranks",
        names=(_FUSED, _EP, "data_parallel_size", "tensor_parallel_size"),
        holds=lambda asked: _is_fused(asked) and 32 < asked.ep_size <= 64,
        outcome=Outcome.WARN,
        text=f"more than 32 ranks: {_MEGA_ONLY}",
        source=_SELECTION,
    ),
    Conflict(
        key="fused-drafts",
        names=(_FUSED, "speculative_config"),
        holds=lambda asked: _is_fused(asked) and asked.num_drafts > 0,
        outcome=Outcome.WARN,
        text=f"draft tokens: {_MEGA_ONLY}",
        source="GLM-5.2 guide, 9.2",
    ),
    Conflict(
        key="fused-weights",
        names=(_FUSED, "model.quant_types"),
        holds=lambda asked: (
            _is_fused(asked)
            and bool(asked.model.quant_types)
            and not asked.model.quant_types <= {"W8A8", "W8A8_DYNAMIC"}
        ),
        outcome=Outcome.WARN,
        text=f"experts that are not W8A8: {_MEGA_ONLY}",
        source="GLM-5.2 guide, 9.2",
    ),
)

EXPERTS: Final = (*SPREAD, *DISPATCH)
