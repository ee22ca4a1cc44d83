import pytest

from services.launcher.options.conflicts.transfer import TRANSFER
from tests.services.launcher.options.cases import (
    BOTH,
    DECODE,
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
        key="connector-role",
        meets=transfer({"kv_connector": "MooncakeConnectorV1"}),
        passes=transfer(PREFILL),
    ),
    Case(
        key="balance-role",
        meets=join("-dp 2", extra(enable_balance_scheduling=True), transfer(DECODE)),
        passes=join("-dp 2", extra(enable_balance_scheduling=True), transfer(BOTH)),
    ),
    Case(
        key="balance-profiling",
        meets=join(
            "-pp 2", extra(enable_balance_scheduling=True, profiling_chunk_config={"enabled": True})
        ),
        passes=extra(enable_balance_scheduling=True),
    ),
    Case(
        key="balance-dyntra",
        meets=extra(
            scheduler_config={
                "enable_balance_scheduling": True,
                "dyntra_lb_config": {"enabled": True},
            }
        ),
        passes=extra(scheduler_config={"enable_balance_scheduling": True}),
    ),
    Case(
        key="profiling-dyntra",
        meets=extra(
            scheduler_config={
                "profiling_chunk_config": {"enabled": True},
                "dyntra_lb_config": {"enabled": True},
            }
        ),
        passes=extra(profiling_chunk_config={"enabled": True}),
    ),
    Case(
        key="dyntra-role",
        meets=join(
            extra(scheduler_config={"dyntra_lb_config": {"enabled": True}}), transfer(PREFILL)
        ),
        passes=join(
            extra(scheduler_config={"dyntra_lb_config": {"enabled": True}}), transfer(DECODE)
        ),
    ),
    Case(
        key="profiling-pp",
        meets=extra(profiling_chunk_config={"enabled": True}),
        passes=join("-pp 2", extra(profiling_chunk_config={"enabled": True})),
    ),
    Case(
        key="recompute-prefill",
        meets=join(extra(recompute_scheduler_enable=True), transfer(PREFILL)),
        passes=join(extra(recompute_scheduler_enable=True), transfer(DECODE)),
    ),
    Case(
        key="recompute-mixed",
        meets=join(extra(recompute_scheduler_enable=True), transfer(BOTH)),
        passes=join(extra(recompute_scheduler_enable=True), transfer(DECODE)),
    ),
    Case(
        key="recompute-policy",
        meets=join(
            extra(recompute_scheduler_enable=True),
            transfer({**DECODE, "kv_load_failure_policy": "recompute"}),
        ),
        passes=join(extra(recompute_scheduler_enable=True), transfer(DECODE)),
    ),
    Case(
        key="reduce-prefill",
        meets=join("-tp 2", extra(enable_reduce_sample=True), transfer(PREFILL)),
        passes=join("-tp 2", extra(enable_reduce_sample=True), transfer(DECODE)),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(TRANSFER, case)


def test_every_rule_has_its_case() -> None:
    check_table(TRANSFER, CASES)
