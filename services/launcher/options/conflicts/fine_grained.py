"""Conflicts of single layers that are cut over replicas."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Conflict, Outcome

_FINE = "additional_config.finegrained_tp_config"
_RECOMPUTE = "additional_config.recompute_scheduler_enable"
_REDUCE = "additional_config.enable_reduce_sample"
_CONFIG = "vllm-ascend ascend_config.py"


def _fine(name: str, asked: Deployment) -> int:
    size: int = getattr(asked.flags.additional_config.finegrained_tp_config, name)
    return size


def _fine_sizes(asked: Deployment) -> list[int]:
    fine = asked.flags.additional_config.finegrained_tp_config
    return [size for name in type(fine).model_fields if (size := getattr(fine, name))]


FINE_GRAINED: Final = (
    Conflict(
        key="fine-o-proj-recompute",
        names=(f"{_FINE}.oproj_tensor_parallel_size", _RECOMPUTE),
        holds=lambda asked: (
            _fine("oproj_tensor_parallel_size", asked) > 0
            and not asked.flags.additional_config.recompute_scheduler_enable
        ),
        outcome=Outcome.REFUSE,
        text="replicas must have equal numbers of tokens, which the recompute scheduler sees to",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-embedding-recompute",
        names=(f"{_FINE}.embedding_tensor_parallel_size", _RECOMPUTE),
        holds=lambda asked: (
            _fine("embedding_tensor_parallel_size", asked) > 0
            and not asked.flags.additional_config.recompute_scheduler_enable
        ),
        outcome=Outcome.REFUSE,
        text="replicas must have equal numbers of tokens, which the recompute scheduler sees to",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-o-proj-tp",
        names=(f"{_FINE}.oproj_tensor_parallel_size", "tensor_parallel_size"),
        holds=lambda asked: (
            _fine("oproj_tensor_parallel_size", asked) > 0 and asked.flags.tensor_parallel_size > 1
        ),
        outcome=Outcome.REFUSE,
        text="a layer is cut over replicas or over the ranks of one",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-o-proj-eager",
        names=(f"{_FINE}.oproj_tensor_parallel_size", "enforce_eager"),
        holds=lambda asked: (
            _fine("oproj_tensor_parallel_size", asked) > 0
            and asked.is_given("enforce_eager")
            and asked.flags.enforce_eager
        ),
        outcome=Outcome.REFUSE,
        text="it needs captured steps",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-o-proj-role",
        names=(f"{_FINE}.oproj_tensor_parallel_size", "kv_transfer_config.kv_role"),
        holds=lambda asked: (
            _fine("oproj_tensor_parallel_size", asked) > 0 and asked.kv_role != "kv_consumer"
        ),
        outcome=Outcome.REFUSE,
        text="only decode nodes cut it over replicas",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-replicas",
        names=(_FINE, "data_parallel_size"),
        holds=lambda asked: any(
            asked.flags.data_parallel_size % size for size in _fine_sizes(asked)
        ),
        outcome=Outcome.REFUSE,
        text="each size must divide the number of replicas",
        source=_CONFIG,
    ),
    Conflict(
        key="fine-dense-model",
        names=(_FINE, "model.n_routed_experts"),
        holds=lambda asked: (
            bool(_fine_sizes(asked)) and asked.model.is_known and not asked.model.n_routed_experts
        ),
        outcome=Outcome.REFUSE,
        text="replicas of a model without experts do not work together",
        source=_CONFIG,
    ),
    Conflict(
        key="reduce-lm-head",
        names=(_REDUCE, f"{_FINE}.lmhead_tensor_parallel_size"),
        holds=lambda asked: (
            asked.flags.additional_config.enable_reduce_sample
            and _fine("lmhead_tensor_parallel_size", asked) > 0
        ),
        outcome=Outcome.REFUSE,
        text="both change which rank has which logits",
        source=_CONFIG,
    ),
)
