"""Conflicts of ranks, stages and machines."""

from typing import Final

from services.launcher.options.deployment import BLOCK_SIZE, Deployment
from services.launcher.options.rules import Conflict, Outcome

_DCP = "decode_context_parallel_size"
_TP = "tensor_parallel_size"
_PP = "pipeline_parallel_size"
_DP = "data_parallel_size"
_PARTITION = "environment.VLLM_PP_LAYER_PARTITION"
_INTERLEAVE = "cp_kv_cache_interleave_size"


def _cuts_heads_unevenly(asked: Deployment) -> bool:
    heads = asked.model.num_attention_heads
    return heads is not None and heads % asked.flags.tensor_parallel_size != 0


def _machines_split_a_rank(asked: Deployment) -> bool:
    flags = asked.flags
    return flags.data_parallel_size * asked.replica_size % flags.nnodes != 0


def _has_more_stages_than_layers(asked: Deployment) -> bool:
    total = asked.model.num_hidden_layers
    return total is not None and asked.flags.pipeline_parallel_size > total


def _partition_of_other_stages(asked: Deployment) -> bool:
    layers = asked.environment.VLLM_PP_LAYER_PARTITION
    return layers is not None and len(layers) != asked.flags.pipeline_parallel_size


def _partition_of_other_layers(asked: Deployment) -> bool:
    layers, total = asked.environment.VLLM_PP_LAYER_PARTITION, asked.model.num_hidden_layers
    return layers is not None and total is not None and sum(layers) != total


RANKS: Final = (
    Conflict(
        key="tp-heads",
        names=(_TP, "model.num_attention_heads"),
        holds=_cuts_heads_unevenly,
        outcome=Outcome.REFUSE,
        text="every rank takes the same number of heads",
        source="vLLM config/model.py",
    ),
    Conflict(
        key="dcp-not-tp",
        names=(_DCP, _TP),
        holds=lambda asked: (
            asked.is_sparse
            and asked.flags.decode_context_parallel_size
            not in {1, asked.flags.tensor_parallel_size}
        ),
        outcome=Outcome.REFUSE,
        text="sparse attention cuts the latent cache over all ranks of a layer, or over none",
        source="vllm-ascend attention/context_parallel/sfa_cp.py",
    ),
    Conflict(
        key="dcp-divides-tp",
        names=(_DCP, _TP),
        holds=lambda asked: (
            not asked.is_sparse
            and asked.flags.tensor_parallel_size % asked.flags.decode_context_parallel_size != 0
        ),
        outcome=Outcome.REFUSE,
        text="the ranks of a layer are cut into equal groups",
        source="vLLM config/parallel.py",
    ),
    Conflict(
        key="interleave-block",
        names=(_INTERLEAVE, "block_size"),
        holds=lambda asked: (
            asked.flags.decode_context_parallel_size > 1
            and BLOCK_SIZE % asked.flags.cp_kv_cache_interleave_size != 0
        ),
        outcome=Outcome.REFUSE,
        text=f"it must divide a block of {BLOCK_SIZE} tokens",
        source="vLLM config/vllm.py",
    ),
    Conflict(
        key="interleave-transfer",
        names=(_INTERLEAVE, "kv_transfer_config", _DCP),
        holds=lambda asked: (
            asked.flags.decode_context_parallel_size > 1
            and asked.kv_role is not None
            and asked.flags.cp_kv_cache_interleave_size != BLOCK_SIZE
        ),
        outcome=Outcome.REFUSE,
        text=f"blocks are moved whole, so a rank's run must be a block of {BLOCK_SIZE} tokens",
        source="vllm-ascend platform.py",
    ),
    Conflict(
        key="interleave-order",
        names=(_INTERLEAVE, _DCP),
        holds=lambda asked: (
            asked.flags.decode_context_parallel_size > 1
            and asked.kv_role is None
            and asked.flags.cp_kv_cache_interleave_size != BLOCK_SIZE
        ),
        outcome=Outcome.WARN,
        text=f"gathered blocks are in the order of positions only with runs of {BLOCK_SIZE} tokens",
        source="vllm-ascend attention/context_parallel/sfa_cp.py",
    ),
    Conflict(
        key="pcp-pp",
        names=("prefill_context_parallel_size", _PP),
        holds=lambda asked: (
            asked.flags.prefill_context_parallel_size > 1 and asked.flags.pipeline_parallel_size > 1
        ),
        outcome=Outcome.REFUSE,
        text="prompts are not cut over ranks and stages at once",
        source="vllm-ascend platform.py",
    ),
)

STAGES: Final = (
    Conflict(
        key="stages-layers",
        names=(_PP, "model.num_hidden_layers"),
        holds=_has_more_stages_than_layers,
        outcome=Outcome.REFUSE,
        text="every stage takes one layer at least",
        source="vLLM distributed/utils.py",
    ),
    Conflict(
        key="replay-ranks",
        names=("settings.worker", _TP, _PP, "enable_expert_parallel"),
        holds=lambda asked: (
            asked.settings.worker == "replay" and (asked.replica_size > 1 or asked.ep_size > 1)
        ),
        outcome=Outcome.REFUSE,
        text="a worker without a model has nothing to cut; several replicas are fine",
        source="own",
    ),
    Conflict(
        key="replay-drafts",
        names=("settings.worker", "speculative_config.num_speculative_tokens"),
        holds=lambda asked: asked.settings.worker == "replay" and asked.num_drafts > 0,
        outcome=Outcome.REFUSE,
        text="a worker without a model drafts nothing",
        source="own",
    ),
    Conflict(
        key="partition-stages",
        names=(_PARTITION, _PP),
        holds=_partition_of_other_stages,
        outcome=Outcome.REFUSE,
        text="the list needs one number for each stage",
        source="vLLM distributed/utils.py",
    ),
    Conflict(
        key="partition-layers",
        names=(_PARTITION, "model.num_hidden_layers"),
        holds=_partition_of_other_layers,
        outcome=Outcome.REFUSE,
        text="the stages must hold each layer once (embedding, head and MTP layer not counted)",
        source="vLLM distributed/utils.py",
    ),
    Conflict(
        key="pp-decode",
        names=(_PP, "kv_transfer_config.kv_role"),
        holds=lambda asked: (
            asked.flags.pipeline_parallel_size > 1 and asked.kv_role == "kv_consumer"
        ),
        outcome=Outcome.REFUSE,
        text="a decode node has one stage",
        source="vllm-ascend distributed/kv_transfer/kv_p2p/mooncake_connector.py",
    ),
    Conflict(
        key="pp-dp-roce",
        names=(_PP, _DP, "environment.HCCL_INTRA_ROCE_ENABLE"),
        holds=lambda asked: (
            asked.flags.pipeline_parallel_size > 1
            and asked.flags.data_parallel_size > 1
            and asked.environment.HCCL_INTRA_ROCE_ENABLE == 1
        ),
        outcome=Outcome.REFUSE,
        text="over RoCE alone, experts are served by stages or by replicas, not by both",
        source="vllm-ascend platform.py",
    ),
    Conflict(
        key="machines-world",
        names=("nnodes", _DP, _PP, _TP),
        holds=_machines_split_a_rank,
        outcome=Outcome.REFUSE,
        text="every machine takes the same number of ranks",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="machine-number",
        names=("node_rank", "nnodes"),
        holds=lambda asked: asked.flags.node_rank >= asked.flags.nnodes,
        outcome=Outcome.REFUSE,
        text="machines are numbered from 0",
        source="vLLM engine/arg_utils.py",
    ),
    Conflict(
        key="machines-backend",
        names=("nnodes", "data_parallel_backend"),
        holds=lambda asked: asked.flags.nnodes > 1 and asked.flags.data_parallel_backend != "mp",
        outcome=Outcome.REFUSE,
        text="several machines are joined by the mp backend only",
        source="vLLM engine/arg_utils.py",
    ),
)

PARALLEL: Final = (*RANKS, *STAGES)
