"""A wrong argument name, type or layout at any call site fails the step."""

import ast
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from services.worker.model.cache_format import CacheFormat
from services.worker.model.decoder import Decoder
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import DeviceGuard
from services.worker.ops.schemas import SCHEMAS
from shared.errors import ConfigError
from tools.npu_contract.cases import STEPS, make_caches, make_step, model_configs
from tools.npu_contract.faults import (
    MODEL,
    Fault,
    find_faults,
    find_sites,
    operator_calls,
    planted_methods,
)

FAULTS = find_faults()
CONFIG = model_configs()["glm-5.2 TP8 heads"]
# Together their steps make every call.
FORMS = ({}, {"cache": CacheFormat(sparse_sfa_c8=True, sparse_li_c8=True)})
CASE = STEPS["mixed"]
# With one tensor of any size and type, only the operator that takes its result can tell.
SHOWN_BY_THE_NEXT = {"npu_dynamic_quant", "npu_swiglu"}


@functools.cache
def decoders() -> list[Decoder]:
    base = ModelSpec(config=CONFIG, dtype=torch.bfloat16, device=torch.device("meta"))
    return [Decoder.build(replace(base, **form)) for form in FORMS]


def run_step() -> torch.Tensor:
    """One step of each form; the logits of the last."""
    token_ids, step = make_step(CASE, "meta")
    with DeviceGuard():
        for decoder in decoders():
            hidden = decoder.forward(token_ids, step, make_caches(decoder.spec, CASE))
            logits = decoder.compute_logits(hidden)
    return logits


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault | None, module: str) -> None:
    for owner, name, method in planted_methods(fault, module):
        monkeypatch.setattr(owner, name, method)


def test_faults_cover_every_operator_and_kind() -> None:
    """No call of the model is outside the functions that are looked at."""
    calls = [
        call for path in MODEL.glob("*.py") for call in operator_calls(ast.parse(path.read_text()))
    ]
    sites = find_sites()
    assert len(sites) == len(calls)
    assert {site.operator for site in sites} == SCHEMAS.keys()
    kinds = Counter(fault.kind for fault in FAULTS)
    assert kinds.keys() == {"name", "type", "layout"}
    assert min(kinds.values()) > 30


@pytest.mark.parametrize("module", sorted({site.module for site in find_sites()}))
def test_without_a_fault_the_copied_module_passes(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, None, module)
    assert run_step().shape == (sum(CASE.query_lens), CONFIG.vocab_size)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_fails_the_step(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, fault, fault.site.module)
    with pytest.raises((RuntimeError, ConfigError)) as failure:
        run_step()
    if fault.kind == "name":
        unknown = f"Unknown keyword argument '{fault.argument}_'"
        missing = f"is missing value for argument '{fault.argument}'"  # one without a default
        assert unknown in str(failure.value) or missing in str(failure.value)
    elif fault.site.operator not in SHOWN_BY_THE_NEXT and isinstance(failure.value, ConfigError):
        assert str(failure.value).startswith(f"{fault.site.operator}: ")
