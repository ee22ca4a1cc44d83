"""A call's free numbers must be the model's own."""

from typing import Any

import pytest
import torch

from services.worker import ops
from services.worker.ops.device_rules import bind
from tools.npu_contract.numbers import NUMBERS, find_wrong_number
from tools.npu_contract.variants import Variant

SPEC = Variant(model="two layers", place="TP8 EP16").spec
CONFIG = SPEC.config


@pytest.fixture(autouse=True)
def operators() -> None:
    ops.register()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check(operator: str, *args: object, **kwargs: object) -> str:
    schema = getattr(torch.ops.npu, operator).default._schema
    return find_wrong_number(SPEC, operator, schema, bind(schema, args, kwargs))


def test_numbers_are_of_arguments_that_exist() -> None:
    for operator, numbers in NUMBERS.items():
        arguments = getattr(torch.ops.npu, operator).default._schema.arguments
        assert numbers.keys() <= {argument.name for argument in arguments}, operator


def test_norms_over_latents_have_their_own_epsilon() -> None:
    x, latent = meta(3, CONFIG.hidden_size), meta(3, CONFIG.q_lora_rank)
    assert check("npu_rms_norm", x, meta(CONFIG.hidden_size), CONFIG.rms_norm_eps) == ""
    gamma = meta(CONFIG.q_lora_rank)
    assert check("npu_rms_norm", latent, gamma, CONFIG.latent_norm_eps) == ""
    wrong = check("npu_rms_norm", latent, gamma, CONFIG.rms_norm_eps)
    assert wrong == "epsilon is 2e-05, must be 3e-06"


def sorting(**changes: Any) -> str:
    named = {
        "active_num": 6,
        "expert_num": 257,  # padding of the other replica chose nobody
        "active_expert_range": [144, 160],
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": 1,
    }
    experts = changes.pop("experts", meta(3, 2, dtype=torch.int32))
    return check("npu_moe_init_routing_v2", meta(len(experts), 8), experts, **(named | changes))


def test_a_rank_sorts_for_its_own_experts_or_for_all() -> None:
    assert sorting() == ""
    assert sorting(active_expert_range=[0, 256]) == ""
    assert "must be [144, 160]" in sorting(active_expert_range=[128, 144])
    assert "must be 257" in sorting(expert_num=256)
    assert "must be 6" in sorting(active_num=5)
    arrived = meta(9, 1, dtype=torch.int32)
    local = {"active_num": 9, "expert_num": 16, "active_expert_range": [0, 16]}
    assert sorting(experts=arrived, **local) == ""


def test_sums_are_asked_for_where_nothing_scales_them() -> None:
    rows, weight, scale = (
        meta(3, 64, dtype=torch.int8),
        meta(64, 32, dtype=torch.int8),
        meta(32, dtype=torch.float32),
    )
    row_scale = meta(3, dtype=torch.float32)
    call = ("npu_quant_matmul", rows, weight, scale)
    assert check(*call, output_dtype=torch.int32) == ""
    assert check(*call, pertoken_scale=row_scale, output_dtype=torch.bfloat16) == ""
    assert "must be torch.int32" in check(*call, output_dtype=torch.bfloat16)
    assert "must be torch.bfloat16" in check(
        *call, pertoken_scale=row_scale, output_dtype=torch.int32
    )


def test_every_other_argument_stays_at_its_default() -> None:
    assert check("npu_swiglu", meta(3, 8)) == ""
    assert check("npu_swiglu", meta(3, 8), 1) == "dim is 1, must be -1"


def test_weights_travel_with_rows_on_an_a2_alone() -> None:
    assert "expert_scales" in check(
        "npu_moe_distribute_dispatch_v2",
        meta(3, 8),
        meta(3, 2, dtype=torch.int32),
        "mc2",
        16,
        9,
        256,
        expert_scales=meta(3, 2, dtype=torch.float32),
    )
