"""A plan as programs read it; sizes in bytes."""

from typing import Any

from services.worker.sizing.advice import Advice, Suggestion
from services.worker.sizing.changes import num_nodes
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.plan import Item, Plan, RankPlan
from services.worker.sizing.report import verdict_text


def as_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    """Everything that the table shows, and the plans behind the suggestions in short."""
    return {
        "deployment": _deployment(plan.deployment),
        "verdict": plan.verdict.name.lower(),
        "fits": plan.fits,
        "summary": verdict_text(plan),
        **_outcome(plan),
        "blocks_per_sequence": plan.blocks_per_seq,
        "ranks": [_rank(rank) for rank in plan.ranks],
        "warnings": list(plan.warnings),
        "suggestions": {
            "faster": [_suggestion(found) for found in advice.faster],
            "enough": [_suggestion(found) for found in advice.enough],
            "together": _suggestion(advice.together) if advice.together else None,
            "gains": [_suggestion(found) for found in advice.gains],
        },
    }


def _deployment(deployment: Deployment) -> dict[str, Any]:
    topology, hardware = deployment.topology, deployment.hardware
    return {
        "scheme": deployment.scheme,
        "topology": str(topology),
        "world_size": topology.world_size,
        "hardware": hardware.name,
        "nodes": num_nodes(topology.world_size, hardware.devices_per_node),
        "gpu_memory_utilization": deployment.utilization if hardware.is_npu else None,
        "max_model_len": deployment.max_model_len,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "num_speculative_tokens": deployment.num_speculative_tokens,
        "sequences_asked_for": deployment.num_full_seqs,
        "enable_sparse_sfa_c8": deployment.cache.sparse_sfa_c8,
        "enable_sparse_li_c8": deployment.cache.sparse_li_c8,
        "enable_dsa_cp": deployment.is_dsa_cp,
        "capture_sizes": list(deployment.captured()),
        "hccl_buffsize": deployment.hccl_mib,
    }


def _outcome(plan: Plan) -> dict[str, int]:
    return {
        "blocks": plan.num_blocks,
        "tokens": plan.num_tokens,
        "full_sequences": plan.num_full_seqs,
    }


def _rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "name": rank.name,
        "count": rank.count,
        "weights": {str(kind): size for kind, size in rank.weights.by_class.items()},
        "weights_total": rank.weights.total,
        "runtime": [_item(item) for item in rank.runtime],
        "limit": rank.limit,
        "free_for_kv": rank.budget,
        "bytes_per_token": rank.cache.per_token,
        "bytes_per_block": rank.cache.per_block,
        "tokens_per_block": rank.cache.tokens_per_block,
        "blocks": rank.num_blocks,
    }


def _item(item: Item) -> dict[str, Any]:
    return {
        "name": item.name,
        "bytes": item.num_bytes,
        "is_estimate": item.is_estimate,
        "detail": item.detail,
        "parts": dict(item.parts),
    }


def _suggestion(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "change": list(suggestion.texts),
        "effect": suggestion.effect,
        "fits": suggestion.plan.fits,
        **_outcome(suggestion.plan),
    }
