import pytest

from services.launcher.options.conflicts.variables import VARIABLES
from tests.services.launcher.options.cases import Case, check_case, check_table

CASES = (
    Case(
        key="pcie-roce",
        meets="HCCL_INTRA_PCIE_ENABLE=1 HCCL_INTRA_ROCE_ENABLE=1",
        passes="HCCL_INTRA_PCIE_ENABLE=0 HCCL_INTRA_ROCE_ENABLE=1",
    ),
    Case(
        key="segments-split",
        meets="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,max_split_size_mb:64",
        passes="PYTORCH_NPU_ALLOC_CONF=expandable_segments:False,max_split_size_mb:64",
    ),
    Case(
        key="segments-collection",
        meets="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True,garbage_collection_threshold:0.8",
        passes="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    ),
    Case(
        key="segments-sleep",
        meets="PYTORCH_NPU_ALLOC_CONF=expandable_segments:True --enable-sleep-mode",
        passes="PYTORCH_NPU_ALLOC_CONF=expandable_segments:False --enable-sleep-mode",
    ),
    Case(
        key="step-collective",
        meets="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=300",
        passes="VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3000",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(VARIABLES, case)


def test_every_rule_has_its_case() -> None:
    check_table(VARIABLES, CASES)
