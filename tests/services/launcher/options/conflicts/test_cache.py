import dataclasses

import pytest

from services.launcher.options.conflicts.cache import CACHES
from tests.services.launcher.options.cases import (
    DECODE,
    DENSE,
    GLM,
    PREFILL,
    W4A8,
    W8A8,
    Case,
    check_case,
    check_table,
    extra,
    join,
    transfer,
)

ODD_LATENT = dataclasses.replace(GLM, kv_lora_rank=448)

CASES = (
    Case(
        key="sfa-c8-dense-model",
        meets=extra(enable_sparse_sfa_c8=True),
        passes=extra(enable_sparse_sfa_c8=True),
        model=DENSE,
        passing_model=GLM,
    ),
    Case(
        key="li-c8-dense-model",
        meets=extra(enable_sparse_li_c8=True),
        passes=extra(enable_sparse_li_c8=True),
        model=DENSE,
        passing_model=GLM,
    ),
    Case(
        key="sfa-c8-latent",
        meets=extra(enable_sparse_sfa_c8=True),
        passes=extra(enable_sparse_sfa_c8=True),
        model=ODD_LATENT,
        passing_model=GLM,
    ),
    Case(
        key="sfa-c8-offload",
        meets=extra(
            enable_sparse_sfa_c8=True,
            sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True},
        ),
        passes=extra(
            enable_sparse_li_c8=True,
            sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True},
        ),
    ),
    Case(
        key="sfa-c8-dcp-w4",
        meets=join("-tp 8 -dcp 8", extra(enable_sparse_sfa_c8=True)),
        passes=join("-tp 8 -dcp 8", extra(enable_sparse_sfa_c8=True)),
        model=W4A8,
        passing_model=W8A8,
    ),
    Case(
        key="reshape-li-c8",
        meets=extra(c8_enable_reshape_optim=True),
        passes=extra(c8_enable_reshape_optim=True, enable_sparse_li_c8=True),
    ),
    Case(
        key="reshape-decode",
        meets=join(extra(c8_enable_reshape_optim=True, enable_sparse_li_c8=True), transfer(DECODE)),
        passes=join(
            extra(c8_enable_reshape_optim=True, enable_sparse_li_c8=True), transfer(PREFILL)
        ),
    ),
    Case(
        key="offload-dsa-cp",
        meets=join(
            "-tp 2",
            extra(
                enable_dsa_cp=True,
                sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True},
            ),
        ),
        passes=join(
            "-tp 2", extra(sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True})
        ),
    ),
    Case(
        key="offload-dcp",
        meets=join(
            "-tp 8 -dcp 8",
            extra(sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True}),
        ),
        passes=join(
            "-tp 8", extra(sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True})
        ),
    ),
    Case(
        key="offload-pp",
        meets=join(
            "-pp 2", extra(sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True})
        ),
        passes=join(
            "-tp 2", extra(sparse_kv_offload_config={"enabled": True, "keep_device_kv_cache": True})
        ),
    ),
    Case(
        key="offload-role",
        meets=extra(sparse_kv_offload_config={"enabled": True}),
        passes=join(extra(sparse_kv_offload_config={"enabled": True}), transfer(DECODE)),
    ),
    Case(
        key="kv-nz-sparse",
        meets=join(extra(enable_kv_nz=True), transfer(DECODE)),
        passes=join(extra(enable_kv_nz=True), transfer(DECODE)),
        model=GLM,
        passing_model=DENSE,
    ),
    Case(
        key="kv-nz-role",
        meets=extra(enable_kv_nz=True),
        passes=join(extra(enable_kv_nz=True), transfer(DECODE)),
        model=DENSE,
    ),
    Case(key="cache-type", meets="--kv-cache-dtype fp8", passes="--kv-cache-dtype bfloat16"),
    Case(key="block-size", meets="--block-size 64", passes="--block-size 128"),
    Case(
        key="dsa-cp-dense-model",
        meets=join("-tp 2", extra(enable_dsa_cp=True)),
        passes=join("-tp 2", extra(enable_dsa_cp=True)),
        model=DENSE,
        passing_model=GLM,
    ),
    Case(
        key="dsa-cp-decode",
        meets=join("-tp 2", extra(enable_dsa_cp=True), transfer(DECODE)),
        passes=join("-tp 2", extra(enable_dsa_cp=True), transfer(PREFILL)),
    ),
    Case(
        key="mlapo-dsa-cp",
        meets=join("-tp 2", extra(enable_dsa_cp=True, enable_mlapo=True)),
        passes=join("-tp 2", extra(enable_mlapo=True)),
    ),
    Case(
        key="mlapo-dcp",
        meets=join("-tp 2 -dcp 2", extra(enable_mlapo=True)),
        passes=join("-tp 2", extra(enable_mlapo=True)),
    ),
    Case(
        key="mlapo-prefill",
        meets=join(extra(enable_mlapo=True), transfer(PREFILL)),
        passes=join(extra(enable_mlapo=True), transfer(DECODE)),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_each_conflict_is_told_with_the_names_of_both_sides(case: Case) -> None:
    check_case(CACHES, case)


def test_every_rule_has_its_case() -> None:
    check_table(CACHES, CASES)
