import dataclasses

import pytest

from services.launcher.options.conflicts.graphs import GRAPHS
from tests.services.launcher.options.cases import (
    DECODE,
    DENSE,
    GLM,
    Case,
    check_case,
    check_table,
    drafts,
    extra,
    graphs,
    join,
    transfer,
)

TWO_LAYERS = dataclasses.replace(GLM, num_nextn_predict_layers=2)

CASES = (
    Case(key="eager-graphs", meets=join("--enforce-eager", graphs()), passes=graphs()),
    Case(
        key="blocking-graphs",
        meets=join("ASCEND_LAUNCH_BLOCKING=1", graphs()),
        passes=join("ASCEND_LAUNCH_BLOCKING=1", graphs(mode="none")),
    ),
    Case(
        key="static-kernel",
        meets=extra(
            ascend_compilation_config={"enable_static_kernel": True, "enable_npugraph_ex": False}
        ),
        passes=extra(
            ascend_compilation_config={"enable_static_kernel": True, "enable_npugraph_ex": True}
        ),
    ),
    Case(
        key="sizes-no-ranks",
        meets=join("-tp 16", graphs(sizes=[4, 8]), extra(enable_dsa_cp=True)),
        passes=join("-tp 16", graphs(sizes=[4, 8])),
    ),
    Case(
        key="sizes-some-ranks",
        meets=join("-tp 16", graphs(sizes=[4, 16, 128]), extra(enable_dsa_cp=True)),
        passes=join("-tp 4", graphs(sizes=[4, 16, 128]), extra(enable_dsa_cp=True)),
    ),
    Case(
        key="sizes-rows",
        meets=join(graphs(sizes=[256, 298]), drafts(3)),
        passes=join(graphs(sizes=[256, 300]), drafts(3)),
    ),
    Case(
        key="sizes-seqs",
        meets=join("--max-num-seqs 8", graphs(sizes=[8, 64]), drafts(3)),
        passes=join("--max-num-seqs 16", graphs(sizes=[8, 64]), drafts(3)),
    ),
    Case(
        key="sizes-none",
        meets=join("--max-num-seqs 8", graphs(sizes=[300, 500])),
        passes=join("--max-num-seqs 8", graphs(sizes=[8, 500])),
    ),
    Case(
        key="sizes-tokens",
        meets=join("--max-num-batched-tokens 256", graphs(sizes=[256, 384])),
        passes=join("--max-num-batched-tokens 384", graphs(sizes=[256, 384])),
    ),
    Case(
        key="sizes-recompute",
        meets=join(
            "--max-num-seqs 256",
            graphs(sizes=[384]),
            drafts(3),
            transfer(DECODE),
            extra(recompute_scheduler_enable=True),
        ),
        passes=join(
            "--max-num-seqs 96",
            graphs(sizes=[384]),
            drafts(3),
            transfer(DECODE),
            extra(recompute_scheduler_enable=True),
        ),
    ),
    Case(
        key="rows-ranks",
        meets=join("-tp 8 -dp 2 -ep", graphs(), drafts(5)),
        passes=join("-tp 8 -dp 2 -ep", graphs(), drafts(3)),
    ),
    Case(key="drafts-rows", meets=drafts(16), passes=drafts(15)),
    Case(key="drafts-layer", meets=drafts(1), passes=drafts(1), model=DENSE, passing_model=GLM),
    Case(key="drafts-multiple", meets=drafts(3), passes=drafts(4), model=TWO_LAYERS),
    Case(
        key="drafts-captured",
        meets=drafts(3, enforce_eager=False),
        passes=drafts(3, enforce_eager=True),
    ),
    Case(
        key="drafts-dynamic-dcp",
        meets=join("-tp 2 -dcp 2", extra(dynamic_spec_config={"method": "dspark"})),
        passes=join("-tp 2", extra(dynamic_spec_config={"method": "dspark"})),
    ),
    Case(
        key="xlite-drafts",
        meets=join(drafts(2), extra(xlite_graph_config={"enabled": True})),
        passes=join(drafts(1), extra(xlite_graph_config={"enabled": True})),
    ),
    Case(
        key="xlite-pp",
        meets=join("-pp 2", extra(xlite_graph_config={"enabled": True})),
        passes=join("-tp 2", extra(xlite_graph_config={"enabled": True})),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(GRAPHS, case)


def test_every_rule_has_its_case() -> None:
    check_table(GRAPHS, CASES)
