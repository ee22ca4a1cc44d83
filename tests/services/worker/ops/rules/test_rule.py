"""What a rule demands when it says nothing, and which of several a call is held against."""

import torch

from services.worker.ops.device_rules import RULES
from services.worker.ops.form import Form
from services.worker.ops.rules.rule import Rule


def test_a_rule_that_says_no_more_takes_every_call_of_its_forms() -> None:
    rule = Rule(tensors={"x": Form("T E")})
    assert rule.applies({})
    assert rule.limits({}, {}) == ""
    assert (rule.options, rule.case) == ({}, "")


def test_operators_with_several_rules_name_their_cases_and_end_in_one_for_the_rest() -> None:
    """Otherwise the page of operators and a refusal could not tell them apart."""
    several = {name: rules for name, rules in RULES.items() if len(rules) > 1}
    assert several
    for name, rules in several.items():
        cases = [rule.case for rule in rules]
        assert all(cases), name
        assert len(set(cases)) == len(cases), name


def test_a_call_is_held_against_the_first_rule_that_applies() -> None:
    first, second = RULES["npu_scatter_nd_update_"]
    bytes_, numbers = (torch.zeros(2, 4, dtype=dtype) for dtype in (torch.int8, torch.float16))
    assert first.applies({"input": bytes_})
    assert not first.applies({"input": numbers})
    assert second.applies({"input": numbers})
