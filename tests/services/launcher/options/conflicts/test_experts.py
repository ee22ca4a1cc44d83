import pytest

from services.launcher.options.conflicts.experts import EXPERTS
from tests.services.launcher.options.cases import (
    DENSE,
    GLM,
    NANO,
    W4A8,
    W8A8,
    Case,
    check_case,
    check_table,
    drafts,
    extra,
    join,
)

CASES = (
    Case(
        key="ep-dense-model", meets="-tp 2 -ep", passes="-tp 2 -ep", model=DENSE, passing_model=GLM
    ),
    Case(key="ep-uneven", meets="-tp 32 -dp 3 -ep", passes="-tp 32 -dp 4 -ep"),
    Case(key="eplb-runner", meets="--enable-eplb", passes="--no-enable-eplb"),
    Case(
        key="eplb-ep",
        meets=join("DYNAMIC_EPLB=true", extra(eplb_config={"dynamic_eplb": True})),
        passes=join("DYNAMIC_EPLB=true -tp 2 -ep", extra(eplb_config={"dynamic_eplb": True})),
    ),
    Case(
        key="eplb-variable",
        meets=join("-tp 2 -ep", extra(eplb_config={"dynamic_eplb": True})),
        passes=join("EXPERT_MAP_RECORD=true -tp 2 -ep", extra(eplb_config={"dynamic_eplb": True})),
    ),
    Case(
        key="eplb-filter",
        meets=join(
            "DYNAMIC_EPLB=true -tp 2 -ep --enable-ep-weight-filter",
            extra(eplb_config={"dynamic_eplb": True}),
        ),
        passes="DYNAMIC_EPLB=true -tp 2 -ep --enable-ep-weight-filter",
    ),
    Case(
        key="shared-dp-ep",
        meets=join("-tp 2", extra(enable_shared_expert_dp=True)),
        passes=join("-tp 2 -ep", extra(enable_shared_expert_dp=True)),
    ),
    Case(
        key="mix-shared-dp",
        meets=extra(mix_placement=True, enable_shared_expert_dp=True),
        passes=extra(mix_placement=True),
    ),
    Case(
        key="mix-overlap",
        meets=extra(mix_placement=True, multistream_overlap_shared_expert=True),
        passes=extra(mix_placement=False, multistream_overlap_shared_expert=True),
    ),
    Case(
        key="flashcomm-o-proj",
        meets=extra(enable_flashcomm1=True, layer_sharding=["o_proj"]),
        passes=extra(enable_flashcomm1=True, layer_sharding=["q_b_proj"]),
    ),
    Case(
        key="fused-hierarchy",
        meets=extra(enable_fused_mc2=1, enable_mc2_hierarchy_comm=True),
        passes=extra(enable_fused_mc2=0, enable_mc2_hierarchy_comm=True),
    ),
    Case(
        key="hierarchy-experts",
        meets=join(
            "DYNAMIC_EPLB=1 -tp 2 -ep",
            extra(
                enable_mc2_hierarchy_comm=True,
                eplb_config={"dynamic_eplb": True, "num_redundant_experts": 512},
            ),
        ),
        passes=join(
            "DYNAMIC_EPLB=1 -tp 2 -ep",
            extra(
                enable_mc2_hierarchy_comm=True,
                eplb_config={"dynamic_eplb": True, "num_redundant_experts": 256},
            ),
        ),
    ),
    Case(
        key="fused-overlap",
        meets=extra(enable_fused_mc2=1, multistream_overlap_shared_expert=True),
        passes=extra(enable_fused_mc2=0, multistream_overlap_shared_expert=True),
    ),
    Case(
        key="fused-shapes",
        meets=extra(enable_fused_mc2=1),
        passes=extra(enable_fused_mc2=1),
        model=NANO,
        passing_model=GLM,
    ),
    Case(
        key="fused-eplb",
        meets=join(
            "DYNAMIC_EPLB=1 -tp 2 -ep",
            extra(enable_fused_mc2=1, eplb_config={"dynamic_eplb": True}),
        ),
        passes=join("-tp 2 -ep", extra(enable_fused_mc2=1)),
    ),
    Case(
        key="fused-ranks",
        meets=join("-tp 16 -dp 8 -ep", extra(enable_fused_mc2=1)),
        passes=join("-tp 16 -dp 4 -ep", extra(enable_fused_mc2=1)),
    ),
    Case(
        key="fused-many-ranks",
        meets=join("-tp 16 -dp 4 -ep", extra(enable_fused_mc2=1)),
        passes=join("-tp 16 -dp 2 -ep", extra(enable_fused_mc2=1)),
    ),
    Case(
        key="fused-drafts",
        meets=join(extra(enable_fused_mc2=1), drafts(1)),
        passes=join(extra(enable_fused_mc2=0), drafts(1)),
    ),
    Case(
        key="fused-weights",
        meets=extra(enable_fused_mc2=1),
        passes=extra(enable_fused_mc2=1),
        model=W4A8,
        passing_model=W8A8,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(EXPERTS, case)


def test_every_rule_has_its_case() -> None:
    check_table(EXPERTS, CASES)
