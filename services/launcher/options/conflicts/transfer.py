"""Conflicts of the two sides of a prefill/decode pair, and of their schedulers."""

from typing import Final

from services.launcher.options.rules import Conflict, Outcome

_ROLE = "kv_transfer_config.kv_role"
_BALANCE = "additional_config.enable_balance_scheduling"
_RECOMPUTE = "additional_config.recompute_scheduler_enable"
_DYNTRA = "additional_config.scheduler_config.dyntra_lb_config.enabled"
_PROFILING = "additional_config.profiling_chunk_config.enabled"
_PLATFORM = "vllm-ascend platform.py"

TRANSFER: Final = (
    Conflict(
        key="connector-role",
        names=("kv_transfer_config.kv_connector", _ROLE),
        holds=lambda asked: (
            asked.value("kv_transfer_config.kv_connector") is not None and asked.kv_role is None
        ),
        outcome=Outcome.REFUSE,
        text="a connector needs to know its side",
        source="vLLM config/kv_transfer.py",
    ),
    Conflict(
        key="balance-role",
        names=(_BALANCE, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.enable_balance_scheduling
            and asked.kv_role in {"kv_producer", "kv_consumer"}
        ),
        outcome=Outcome.REFUSE,
        text="replicas admit together only where prompts and decoding are mixed",
        source=_PLATFORM,
    ),
    Conflict(
        key="balance-profiling",
        names=(_BALANCE, _PROFILING),
        holds=lambda asked: (
            asked.flags.additional_config.enable_balance_scheduling
            and asked.flags.additional_config.profiling_chunk_config.enabled
        ),
        outcome=Outcome.REFUSE,
        text="both decide what is admitted",
        source="vllm-ascend ascend_config.py",
    ),
    Conflict(
        key="balance-dyntra",
        names=(_BALANCE, _DYNTRA),
        holds=lambda asked: (
            asked.flags.additional_config.enable_balance_scheduling
            and asked.flags.additional_config.scheduler_config.dyntra_lb_config.enabled
        ),
        outcome=Outcome.REFUSE,
        text="both decide what is admitted",
        source=_PLATFORM,
    ),
    Conflict(
        key="profiling-dyntra",
        names=(_PROFILING, _DYNTRA),
        holds=lambda asked: (
            asked.flags.additional_config.profiling_chunk_config.enabled
            and asked.flags.additional_config.scheduler_config.dyntra_lb_config.enabled
        ),
        outcome=Outcome.REFUSE,
        text="both decide what is admitted",
        source=_PLATFORM,
    ),
    Conflict(
        key="dyntra-role",
        names=(_DYNTRA, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.scheduler_config.dyntra_lb_config.enabled
            and asked.kv_role != "kv_consumer"
        ),
        outcome=Outcome.REFUSE,
        text="it balances decode nodes",
        source=_PLATFORM,
    ),
    Conflict(
        key="profiling-pp",
        names=(_PROFILING, "pipeline_parallel_size"),
        holds=lambda asked: (
            asked.flags.additional_config.profiling_chunk_config.enabled
            and asked.flags.pipeline_parallel_size == 1
        ),
        outcome=Outcome.REFUSE,
        text="it fits chunks to stages",
        source="vllm-ascend ascend_config.py",
    ),
    Conflict(
        key="recompute-prefill",
        names=(_RECOMPUTE, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.recompute_scheduler_enable
            and asked.kv_role == "kv_producer"
        ),
        outcome=Outcome.SWITCH_OFF,
        text="a prefill node has no one to send requests back to",
        source=_PLATFORM,
    ),
    Conflict(
        key="recompute-mixed",
        names=(_RECOMPUTE, _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.recompute_scheduler_enable
            and asked.kv_role in {None, "kv_both"}
        ),
        outcome=Outcome.REFUSE,
        text="only decode nodes send requests back",
        source=_PLATFORM,
    ),
    Conflict(
        key="recompute-policy",
        names=(_RECOMPUTE, "kv_transfer_config.kv_load_failure_policy"),
        holds=lambda asked: (
            asked.flags.additional_config.recompute_scheduler_enable
            and asked.kv_role == "kv_consumer"
            and asked.value("kv_transfer_config.kv_load_failure_policy") == "recompute"
        ),
        outcome=Outcome.WARN,
        text="after a failed load the decode node computes prompts, which it is said never to do",
        source="vllm-ascend worker/model_runner_v1.py",
    ),
    Conflict(
        key="reduce-prefill",
        names=("additional_config.enable_reduce_sample", _ROLE),
        holds=lambda asked: (
            asked.flags.additional_config.enable_reduce_sample and asked.kv_role == "kv_producer"
        ),
        outcome=Outcome.REFUSE,
        text="prefill nodes sample from all logits",
        source="vllm-ascend ascend_config.py",
    ),
)
