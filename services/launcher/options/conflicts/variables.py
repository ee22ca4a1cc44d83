"""Conflicts of environment variables with each other and with flags."""

from typing import Final

from services.launcher.options.deployment import Deployment
from services.launcher.options.rules import Conflict, Outcome

_ALLOC = "environment.PYTORCH_NPU_ALLOC_CONF"
_SEGMENTS = f"{_ALLOC}.expandable_segments"
_CONF = "torch_npu allocator"
# A collective gives up after so many seconds when HCCL_EXEC_TIMEOUT is not set.
HCCL_EXEC_TIMEOUT_S: Final = 1836


def _grows(asked: Deployment) -> bool:
    return asked.value(_SEGMENTS) is True


def _ends_before_collectives(asked: Deployment) -> bool:
    step = asked.environment.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
    collective = asked.environment.HCCL_EXEC_TIMEOUT or HCCL_EXEC_TIMEOUT_S
    return step is not None and step <= collective


VARIABLES: Final = (
    Conflict(
        key="pcie-roce",
        names=("environment.HCCL_INTRA_PCIE_ENABLE", "environment.HCCL_INTRA_ROCE_ENABLE"),
        holds=lambda asked: (
            asked.environment.HCCL_INTRA_PCIE_ENABLE == 1
            and asked.environment.HCCL_INTRA_ROCE_ENABLE == 1
        ),
        outcome=Outcome.REFUSE,
        text="the NPUs of a node talk over one of them",
        source="HCCL manual",
    ),
    Conflict(
        key="segments-split",
        names=(_SEGMENTS, f"{_ALLOC}.max_split_size_mb"),
        holds=lambda asked: (
            _grows(asked) and asked.value(f"{_ALLOC}.max_split_size_mb") is not None
        ),
        outcome=Outcome.REFUSE,
        text="segments that grow are not split",
        source=_CONF,
    ),
    Conflict(
        key="segments-collection",
        names=(_SEGMENTS, f"{_ALLOC}.garbage_collection_threshold"),
        holds=lambda asked: (
            _grows(asked) and asked.value(f"{_ALLOC}.garbage_collection_threshold") is not None
        ),
        outcome=Outcome.REFUSE,
        text="segments that grow are not collected",
        source=_CONF,
    ),
    Conflict(
        key="segments-sleep",
        names=("enable_sleep_mode", _SEGMENTS),
        holds=lambda asked: asked.flags.enable_sleep_mode and _grows(asked),
        outcome=Outcome.REFUSE,
        text="segments that grow cannot be given back",
        source="vllm-ascend platform.py",
    ),
    Conflict(
        key="step-collective",
        names=(
            "environment.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
            "environment.HCCL_EXEC_TIMEOUT",
        ),
        holds=_ends_before_collectives,
        outcome=Outcome.WARN,
        text=f"a step has to outlast its collectives ({HCCL_EXEC_TIMEOUT_S} s if not set), or the "
        "cause of a hang is never told",
        source="vllm-ascend platform.py",
    ),
)
