"""Conflicts of caches and attention."""

from typing import Final

from services.launcher.options.deployment import BLOCK_SIZE, Deployment
from services.launcher.options.rules import Conflict, Outcome

_SFA = "additional_config.enable_sparse_sfa_c8"
_LI = "additional_config.enable_sparse_li_c8"
_RESHAPE = "additional_config.c8_enable_reshape_optim"
_OFFLOAD = "additional_config.sparse_kv_offload_config.enabled"
_DSA_CP = "additional_config.enable_dsa_cp"
_MLAPO = "additional_config.enable_mlapo"
_KV_NZ = "additional_config.enable_kv_nz"
_DCP = "decode_context_parallel_size"
_ROLE = "kv_transfer_config.kv_role"
_CONFIG = "vllm-ascend ascend_config.py"
_SFA_FILE = "vllm-ascend attention/sfa_v1.py"


def _offloads(asked: Deployment) -> bool:
    return asked.flags.additional_config.sparse_kv_offload_config.enabled


def _offloads_without_decode(asked: Deployment) -> bool:
    offload = asked.flags.additional_config.sparse_kv_offload_config
    return offload.enabled and not offload.keep_device_kv_cache and asked.kv_role != "kv_consumer"


C8: Final = (
    Conflict(
        key="sfa-c8-dense-model",
        names=(_SFA, "model.index_topk"),
        holds=lambda asked: asked.flags.additional_config.enable_sparse_sfa_c8 and asked.is_dense,
        outcome=Outcome.SWITCH_OFF,
        text="the checkpoint has no sparse attention",
        source=_CONFIG,
    ),
    Conflict(
        key="li-c8-dense-model",
        names=(_LI, "model.index_topk"),
        holds=lambda asked: asked.flags.additional_config.enable_sparse_li_c8 and asked.is_dense,
        outcome=Outcome.SWITCH_OFF,
        text="the checkpoint has no indexer",
        source=_CONFIG,
    ),
    Conflict(
        key="sfa-c8-latent",
        names=(_SFA, "model.kv_lora_rank"),
        holds=lambda asked: (
            asked.flags.additional_config.enable_sparse_sfa_c8
            and (asked.model.kv_lora_rank or 0) % 128 != 0
        ),
        outcome=Outcome.REFUSE,
        text="latents are quantized in runs of 128 numbers",
        source=_SFA_FILE,
    ),
    Conflict(
        key="sfa-c8-offload",
        names=(_SFA, _OFFLOAD),
        holds=lambda asked: asked.flags.additional_config.enable_sparse_sfa_c8 and _offloads(asked),
        outcome=Outcome.REFUSE,
        text="a latent cache of 8 bits is not kept in host memory",
        source=_CONFIG,
    ),
    Conflict(
        key="sfa-c8-dcp-w4",
        names=(_SFA, _DCP, "model.quant_types"),
        holds=lambda asked: (
            asked.flags.additional_config.enable_sparse_sfa_c8
            and asked.flags.decode_context_parallel_size > 1
            and "W4A8_DYNAMIC" in asked.model.quant_types
        ),
        outcome=Outcome.WARN,
        text="the guide advises against a cut 8-bit latent cache with weights of 4 bits",
        source="GLM-5.2 guide, 9.2",
    ),
    Conflict(
        key="reshape-li-c8",
        names=(_RESHAPE, _LI),
        holds=lambda asked: (
            asked.flags.additional_config.c8_enable_reshape_optim
            and not asked.flags.additional_config.enable_sparse_li_c8
        ),
        outcome=Outcome.REFUSE,
        text="there are no 8-bit indexer keys to write",
        source=_CONFIG,
    ),
    Conflict(
        key="reshape-decode",
        names=(_RESHAPE, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.c8_enable_reshape_optim and asked.kv_role == "kv_consumer"
        ),
        outcome=Outcome.SWITCH_OFF,
        text="only prefill nodes write that way",
        source=_CONFIG,
    ),
)

CACHE: Final = (
    Conflict(
        key="offload-dsa-cp",
        names=(_OFFLOAD, _DSA_CP),
        holds=lambda asked: _offloads(asked) and asked.flags.additional_config.enable_dsa_cp,
        outcome=Outcome.REFUSE,
        text="a cache in host memory is not read by cut tokens",
        source=_SFA_FILE,
    ),
    Conflict(
        key="offload-dcp",
        names=(_OFFLOAD, _DCP),
        holds=lambda asked: _offloads(asked) and asked.flags.decode_context_parallel_size > 1,
        outcome=Outcome.REFUSE,
        text="a cache in host memory is not cut over ranks",
        source=_CONFIG,
    ),
    Conflict(
        key="offload-pp",
        names=(_OFFLOAD, "pipeline_parallel_size"),
        holds=lambda asked: _offloads(asked) and asked.flags.pipeline_parallel_size > 1,
        outcome=Outcome.REFUSE,
        text="a cache in host memory belongs to one stage",
        source=_CONFIG,
    ),
    Conflict(
        key="offload-role",
        names=(_OFFLOAD, _ROLE),
        holds=_offloads_without_decode,
        outcome=Outcome.REFUSE,
        text="only decode nodes keep the cache in host memory (or any, with keep_device_kv_cache)",
        source=_CONFIG,
    ),
    Conflict(
        key="kv-nz-sparse",
        names=(_KV_NZ, "model.index_topk"),
        holds=lambda asked: asked.flags.additional_config.enable_kv_nz and asked.is_sparse,
        outcome=Outcome.REFUSE,
        text="sparse attention reads caches in ND layout",
        source=_CONFIG,
    ),
    Conflict(
        key="kv-nz-role",
        names=(_KV_NZ, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.enable_kv_nz and asked.kv_role != "kv_consumer"
        ),
        outcome=Outcome.REFUSE,
        text="only decode nodes keep caches in NZ layout",
        source=_CONFIG,
    ),
    Conflict(
        key="cache-type",
        names=("kv_cache_dtype", "model.index_topk"),
        holds=lambda asked: (
            asked.is_sparse and asked.flags.kv_cache_dtype not in {"auto", "bfloat16"}
        ),
        outcome=Outcome.SWITCH_OFF,
        text="sparse attention has caches of the model's type, or of 8 bits by "
        "enable_sparse_sfa_c8 and enable_sparse_li_c8",
        source="vllm-ascend platform.py",
        becomes="auto",
    ),
    Conflict(
        key="block-size",
        names=("block_size", "enable_chunked_prefill"),
        holds=lambda asked: asked.flags.block_size != BLOCK_SIZE,
        outcome=Outcome.SWITCH_OFF,
        text=f"with chunked prefill a block has {BLOCK_SIZE} tokens",
        source="vllm-ascend platform.py",
        becomes=BLOCK_SIZE,
    ),
)

ATTENTION: Final = (
    Conflict(
        key="dsa-cp-dense-model",
        names=(_DSA_CP, "model.index_topk"),
        holds=lambda asked: asked.flags.additional_config.enable_dsa_cp and asked.is_dense,
        outcome=Outcome.SWITCH_OFF,
        text="the checkpoint has no indexer",
        source=_CONFIG,
    ),
    Conflict(
        key="dsa-cp-decode",
        names=(_DSA_CP, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.enable_dsa_cp and asked.kv_role == "kv_consumer"
        ),
        outcome=Outcome.WARN,
        text="cut tokens are for prompts; decode nodes cut the cache instead",
        source="GLM-5.2 guide, 9.2",
    ),
    Conflict(
        key="mlapo-dsa-cp",
        names=(_MLAPO, _DSA_CP),
        holds=lambda asked: (
            asked.flags.additional_config.enable_mlapo
            and asked.flags.additional_config.enable_dsa_cp
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the one operator does not take cut tokens",
        source=_SFA_FILE,
    ),
    Conflict(
        key="mlapo-dcp",
        names=(_MLAPO, _DCP),
        holds=lambda asked: (
            asked.flags.additional_config.enable_mlapo
            and asked.flags.decode_context_parallel_size > 1
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the one operator does not write a cut cache",
        source=_SFA_FILE,
    ),
    Conflict(
        key="mlapo-prefill",
        names=(_MLAPO, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.enable_mlapo and asked.kv_role == "kv_producer"
        ),
        outcome=Outcome.SWITCH_OFF,
        text="the one operator is for decode nodes",
        source=_SFA_FILE,
    ),
)

CACHES: Final = (*C8, *CACHE, *ATTENTION)
