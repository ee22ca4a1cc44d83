"""The rules cover every operator, and the guard holds calls against them.

Each family's demands have their tests in `rules`.
"""

from typing import Any

import pytest
import torch

from services.worker.ops.device_rules import RULES, DeviceGuard, find_rule, find_violation
from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError

BF16 = torch.bfloat16


def schema(name: str) -> Any:
    return torch._C.parse_schema(f"npu::{SCHEMAS[name]}")


def test_every_operator_has_a_rule_over_its_own_arguments() -> None:
    assert RULES.keys() == SCHEMAS.keys()
    for name, rules in RULES.items():
        arguments = {argument.name for argument in schema(name).arguments}
        for rule in rules:
            assert rule.tensors.keys() | rule.options.keys() <= arguments, name


def test_an_operator_without_a_rule_is_refused() -> None:
    assert find_rule("npu_new", {}) is None
    assert "no rule is written down for this operator" in find_violation("npu_new", {})


def test_the_guard_names_operator_argument_and_reason() -> None:
    x = torch.zeros((2, 6), dtype=BF16)
    gamma = torch.ones(6)
    with DeviceGuard(), pytest.raises(ConfigError, match=r"npu_rms_norm: gamma: torch\.float32"):
        torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)


def test_the_guard_lets_right_calls_through() -> None:
    x = torch.zeros((2, 6), dtype=BF16)
    with DeviceGuard():
        normed, _ = torch.ops.npu.npu_rms_norm(x, torch.ones(6, dtype=BF16), 1e-5)
    assert normed.count_nonzero() == 0
