"""Faults follow from what a sound run passes; planted ones change exactly one argument."""

from collections.abc import Mapping

import pytest
import torch

from services.worker import ops
from services.worker.model.norm import RMSNorm
from services.worker.ops import nz
from services.worker.ops.device_rules import DeviceGuard
from shared.errors import ConfigError
from tools.npu_contract.drive import Recorder, Run, build, drive
from tools.npu_contract.faults import (
    Fault,
    Kind,
    _wrong_type,
    _wrong_value,
    find_faults,
    planted_methods,
)
from tools.npu_contract.sites import STEP, Reached, Site, find_reached
from tools.npu_contract.variants import FAULT_VARIANTS


@pytest.fixture(scope="module")
def reached() -> Mapping[Site, list[Reached]]:
    ops.register()
    return find_reached()


def kinds(faults: list[Fault], operator: str, argument: str) -> set[Kind]:
    found = [f for f in faults if (f.site.operator, f.argument) == (operator, argument)]
    return {fault.kind for fault in found}


def test_what_may_be_wrong_depends_on_the_argument(reached: Mapping[Site, list[Reached]]) -> None:
    faults = find_faults(reached)
    attention = "npu_sparse_flash_attention"
    assert kinds(faults, attention, "query") == {Kind.TYPE, Kind.LAYOUT}  # by position
    table = {Kind.NAME, Kind.MISSING, Kind.TYPE, Kind.LAYOUT}
    assert kinds(faults, attention, "block_table") == table | {Kind.BLOCKS}
    assert kinds(faults, attention, "attention_mode") == {Kind.NAME, Kind.MISSING, Kind.VALUE}
    # The default itself: nothing changes when it is left out.
    assert kinds(faults, attention, "sparse_block_size") == {Kind.NAME, Kind.VALUE}
    fused = kinds(faults, "npu_grouped_matmul_swiglu_quant_v2", "weight")
    assert fused == {Kind.TYPE, Kind.LAYOUT, Kind.BLOCKS}
    assert kinds(faults, "npu_quant_matmul", "x2") == {Kind.TYPE, Kind.LAYOUT}  # either layout


def test_other_values_are_near_and_of_the_same_kind() -> None:
    assert _wrong_value(True) is False
    assert [_wrong_value(number) for number in (3, 0, -1)] == [2, 1, 0]
    assert _wrong_value(0.5) == 1.0
    assert _wrong_value("TND") == "BSND"
    assert _wrong_value("BSND") == "Norm"
    assert _wrong_value([1, 0, 2]) == [2, 0, 1]
    assert _wrong_value(torch.bfloat16) is torch.float32


@pytest.mark.parametrize(
    ("operator", "argument", "dtype", "wrong"),
    [
        ("npu_add_rms_norm", "x1", torch.bfloat16, torch.float32),  # taken, but not beside bf16
        ("npu_swiglu", "input", torch.bfloat16, torch.int16),  # alone it may be any float
        ("npu_quant_matmul", "scale", torch.float32, torch.float16),  # bf16 is taken
        ("npu_scatter_nd_update_", "indices", torch.int64, torch.float16),  # int32 is taken
        ("npu_kv_rmsnorm_rope_cache_v2", "index", torch.int64, torch.int32),
    ],
)
def test_wrong_types_are_types_that_the_operator_does_not_take(
    operator: str, argument: str, dtype: torch.dtype, wrong: torch.dtype
) -> None:
    fault = Fault(Site("model.norm", 1, "f", operator), argument, Kind.TYPE)
    assert _wrong_type(torch.empty(2, 2, dtype=dtype, device="meta"), fault).dtype is wrong


def test_a_planted_method_stands_in_for_the_true_one_and_names_its_place(
    reached: Mapping[Site, list[Reached]], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = next(site for site in reached if site.function == "RMSNorm.__call__")
    fault = Fault(site, "gamma", Kind.TYPE)
    owners = {(owner, name) for owner, name, _ in planted_methods(fault, site.module)}
    assert owners == {(RMSNorm, name) for name in ("__init__", "__call__", "add")}
    for owner, name, method in planted_methods(fault, site.module):
        monkeypatch.setattr(owner, name, method)
    variant = FAULT_VARIANTS[0]
    with pytest.raises(ConfigError, match=r"npu_rms_norm: gamma: torch\.float32 differs"):
        drive(build(variant), variant, STEP)


def test_a_weight_in_blocks_is_opaque_to_everything_else() -> None:
    weight = nz.shaped(torch.empty(64, 32, dtype=torch.int8, device="meta"))
    with Recorder(FAULT_VARIANTS[0].spec, Run()), DeviceGuard():
        weight.view(torch.int32)
        with pytest.raises(ConfigError, match="in the blocked layout is opaque"):
            weight.clone()
