import pytest

from services.launcher.options.conflicts.parallel import PARALLEL
from tests.services.launcher.options.cases import (
    DECODE,
    DENSE,
    PREFILL,
    Case,
    check_case,
    check_table,
    drafts,
    join,
    transfer,
)

CASES = (
    Case(key="tp-heads", meets="-tp 3", passes="-tp 8"),
    Case(key="dcp-not-tp", meets="-tp 8 -dcp 4", passes="-tp 8 -dcp 8"),
    Case(key="dcp-divides-tp", meets="-tp 8 -dcp 3", passes="-tp 8 -dcp 4", model=DENSE),
    Case(
        key="interleave-block",
        meets="-tp 8 -dcp 8 --cp-kv-cache-interleave-size 96",
        passes="-tp 8 -dcp 8 --cp-kv-cache-interleave-size 64",
    ),
    Case(
        key="interleave-transfer",
        meets=join("-tp 8 -dcp 8 --cp-kv-cache-interleave-size 64", transfer(PREFILL)),
        passes=join("-tp 8 -dcp 8 --cp-kv-cache-interleave-size 128", transfer(PREFILL)),
    ),
    Case(
        key="interleave-order",
        meets="-tp 8 -dcp 8",
        passes="-tp 8 -dcp 8 --cp-kv-cache-interleave-size 128",
    ),
    Case(key="pcp-pp", meets="-pcp 2 -pp 2", passes="-pcp 2"),
    Case(key="stages-layers", meets="-pp 79", passes="-pp 78"),
    Case(key="replay-ranks", meets="--worker replay -tp 2", passes="--worker replay -dp 2"),
    Case(
        key="replay-drafts",
        meets=join("--worker replay", drafts(2)),
        passes="--worker replay",
    ),
    Case(
        key="partition-stages",
        meets="VLLM_PP_LAYER_PARTITION=41,37",
        passes="VLLM_PP_LAYER_PARTITION=41,37 -pp 2",
    ),
    Case(
        key="partition-layers",
        meets="VLLM_PP_LAYER_PARTITION=40,37 -pp 2",
        passes="VLLM_PP_LAYER_PARTITION=41,37 -pp 2",
    ),
    Case(
        key="pp-decode",
        meets=join("-pp 2", transfer(DECODE)),
        passes=join("-pp 2", transfer(PREFILL)),
    ),
    Case(
        key="pp-dp-roce",
        meets="HCCL_INTRA_ROCE_ENABLE=1 -pp 2 -dp 2",
        passes="HCCL_INTRA_ROCE_ENABLE=1 -pp 2",
    ),
    Case(key="machines-world", meets="--nnodes 3 -tp 8 -pp 2", passes="--nnodes 2 -tp 8 -pp 2"),
    Case(
        key="machine-number",
        meets="--nnodes 2 -tp 2 --node-rank 2",
        passes="--nnodes 2 -tp 2 --node-rank 1",
    ),
    Case(
        key="machines-backend",
        meets="--nnodes 2 -dp 2 --data-parallel-backend ray",
        passes="--nnodes 2 -dp 2",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(PARALLEL, case)


def test_every_rule_has_its_case() -> None:
    check_table(PARALLEL, CASES)
