import pytest

from services.launcher.options.conflicts.fine_grained import FINE_GRAINED
from tests.services.launcher.options.cases import (
    DECODE,
    DENSE,
    GLM,
    PREFILL,
    Case,
    check_case,
    check_table,
    extra,
    join,
    transfer,
)

CASES = (
    Case(
        key="fine-o-proj-recompute",
        meets=join(
            "-dp 4",
            extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2}),
            transfer(DECODE),
        ),
        passes=join(
            "-dp 4",
            extra(
                finegrained_tp_config={"oproj_tensor_parallel_size": 2},
                recompute_scheduler_enable=True,
            ),
            transfer(DECODE),
        ),
    ),
    Case(
        key="fine-embedding-recompute",
        meets=join("-dp 4", extra(finegrained_tp_config={"embedding_tensor_parallel_size": 2})),
        passes=join(
            "-dp 4",
            extra(
                finegrained_tp_config={"embedding_tensor_parallel_size": 2},
                recompute_scheduler_enable=True,
            ),
            transfer(DECODE),
        ),
    ),
    Case(
        key="fine-o-proj-tp",
        meets=join("-dp 4 -tp 2", extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2})),
        passes=join("-dp 4", extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2})),
    ),
    Case(
        key="fine-o-proj-eager",
        meets=join(
            "-dp 4 --enforce-eager", extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2})
        ),
        passes=join("-dp 4", extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2})),
    ),
    Case(
        key="fine-o-proj-role",
        meets=join(
            "-dp 4",
            extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2}),
            transfer(PREFILL),
        ),
        passes=join(
            "-dp 4",
            extra(finegrained_tp_config={"oproj_tensor_parallel_size": 2}),
            transfer(DECODE),
        ),
    ),
    Case(
        key="fine-replicas",
        meets=join("-dp 4", extra(finegrained_tp_config={"lmhead_tensor_parallel_size": 3})),
        passes=join("-dp 4", extra(finegrained_tp_config={"lmhead_tensor_parallel_size": 4})),
    ),
    Case(
        key="fine-dense-model",
        meets=join("-dp 4", extra(finegrained_tp_config={"mlp_tensor_parallel_size": 4})),
        passes=join("-dp 4", extra(finegrained_tp_config={"mlp_tensor_parallel_size": 4})),
        model=DENSE,
        passing_model=GLM,
    ),
    Case(
        key="reduce-lm-head",
        meets=join(
            "-dp 4",
            extra(
                finegrained_tp_config={"lmhead_tensor_parallel_size": 2}, enable_reduce_sample=True
            ),
        ),
        passes=join(
            "-dp 4",
            extra(
                finegrained_tp_config={"lmhead_tensor_parallel_size": 2}, enable_reduce_sample=False
            ),
        ),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(FINE_GRAINED, case)


def test_every_rule_has_its_case() -> None:
    check_table(FINE_GRAINED, CASES)
