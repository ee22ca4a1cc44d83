"""A wrong argument at any call of a device operator in the worker fails a step that makes it."""

import ast
import functools
from collections import Counter
from collections.abc import Mapping

import pytest

from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError
from tools.npu_contract.drive import Run, build, drive
from tools.npu_contract.faults import Fault, Kind, find_faults, planted_methods
from tools.npu_contract.sites import (
    STEP,
    Reached,
    Site,
    find_reached,
    find_sites,
    operator_calls,
    sources,
)
from tools.npu_contract.variants import FAULT_VARIANTS, Variant

# Alone such a call is sound: only the operator that takes its result can tell.
SHOWN_BY_THE_NEXT = {
    ("npu_dynamic_quant", "dst_type"),
    ("npu_dynamic_quant", "input"),
    ("npu_moe_distribute_dispatch_v2", "quant_mode"),
    ("npu_moe_init_routing_v2", "quant_mode"),
    ("npu_quantize", "input"),
    ("npu_swiglu", "input"),
}


@functools.cache
def reached() -> Mapping[Site, list[Reached]]:
    return find_reached()


def run(variant: Variant) -> Run:
    """Loading and a step, all new: a fault may be in either."""
    return drive(build(variant), variant, STEP)


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault | None, module: str) -> None:
    for owner, name, method in planted_methods(fault, module):
        monkeypatch.setattr(owner, name, method)


def test_no_call_is_outside_the_functions_that_are_looked_at() -> None:
    calls = [call for text in sources().values() for call in operator_calls(ast.parse(text))]
    assert len(find_sites()) == len(calls)
    assert {site.operator for site in find_sites()} == SCHEMAS.keys()


def test_every_call_is_made_by_a_variant() -> None:
    assert [str(site) for site, runs in reached().items() if not runs] == []


def test_there_are_faults_of_every_kind_for_every_call() -> None:
    faults = find_faults(reached())
    assert {fault.site for fault in faults} == set(find_sites())
    kinds = Counter(fault.kind for fault in faults)
    assert kinds.keys() == set(Kind)
    assert min(kinds.values()) > 20


@pytest.mark.parametrize("module", sorted({site.module for site in find_sites()}))
def test_without_a_fault_the_copied_module_passes(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, None, module)
    for variant in FAULT_VARIANTS:
        assert run(variant).calls


@pytest.mark.parametrize("fault", find_faults(reached()), ids=str)
def test_a_planted_fault_fails_a_step(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, fault.site.module)
    failure = first_failure(fault)
    assert failure is not None, "no variant that makes the call fails"
    text = str(failure)
    if fault.kind is Kind.NAME:
        unknown = f"Unknown keyword argument '{fault.argument}_'"
        missing = f"is missing value for argument '{fault.argument}'"  # one without a default
        assert unknown in text or missing in text
    elif isinstance(failure, ConfigError):
        shown = (fault.site.operator, fault.argument) in SHOWN_BY_THE_NEXT
        assert shown or text.startswith(f"{fault.site.operator}: ")


def first_failure(fault: Fault) -> Exception | None:
    """What is said by the first variant that makes the call and cannot."""
    for found in reached()[fault.site]:
        try:
            run(found.variant)
        except (RuntimeError, ConfigError) as error:
            return error
    return None
