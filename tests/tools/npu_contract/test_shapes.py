"""Expected sizes follow from the model's sizes and a rank's place."""

import torch

from services.worker.parallel.moe_method import MoeMethod
from tools.npu_contract.shapes import StepShapes, find_wrong_shape
from tools.npu_contract.variants import VARIANTS, Variant

BF16, F32, I8, I32, I64 = torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.int64


def expected(place: str, tokens: int = 64, model: str = "glm-5.2") -> dict[str, list[object]]:
    variant = Variant(model=model, place=place)
    found = StepShapes(variant.spec, variant.method, tokens).expected()
    return {operator: list(results) for operator, results in found.items()}


def test_a_rank_has_its_share_of_heads() -> None:
    attention = "npu_sparse_flash_attention"
    assert expected("whole")[attention] == [(((64, 64, 512), BF16), None, None)]
    assert expected("TP16")[attention] == [(((64, 4, 512), BF16), None, None)]
    # All heads, of an eighth of the tokens.
    assert expected("DSA-CP8")[attention] == [(((8, 64, 512), BF16), None, None)]
    assert expected("FlashComm8")[attention] == [(((64, 8, 512), BF16), None, None)]


def test_rows_of_experts_depend_on_the_way_to_them() -> None:
    sorting = "npu_moe_init_routing_v2"
    whole = (((512, 6144), BF16), ((512,), I32), ((256,), I64), None)
    assert whole in expected("whole")[sorting]
    gathered = (((1024, 6144), BF16), ((1024,), I32), ((16,), I64), None)
    assert gathered in expected("TP8 EP16")[sorting]
    # 8 of 64 tokens are this rank's; each of 16 ranks has room for all of them.
    fused = expected("TP8 EP16, MC2")
    assert (((1024, 6144), BF16), None, None, ((16,), I64), None, None, None) in fused[
        "npu_moe_distribute_dispatch_v2"
    ]
    assert (((8, 6144), BF16),) in fused["npu_moe_distribute_combine_v2"]
    # 24 ranks send 512 copies each, as even as 256 experts allow; 11 experts are here.
    arrived = (((24 * 22, 6144), BF16), ((24 * 22,), I32), ((11,), I64), None)
    assert arrived in expected("EP24")[sorting]


def test_cut_tokens_meet_before_the_output_product() -> None:
    quantized = expected("DSA-CP8")["npu_quantize"]
    assert (((64, 2048), I8),) in quantized  # 8 tokens of 8 ranks, 8 heads of 256


def test_norms_and_routers_see_the_share_of_a_cut_stream() -> None:
    cut, whole = expected("FlashComm8 EP16"), expected("TP8 EP16")
    for name, tokens in (("npu_add_rms_norm", 8), ("npu_moe_gating_top_k", 8)):
        assert cut[name][0][0][0][0] == tokens
        assert whole[name][0][0][0][0] == 64
    # Sixteen ranks bring 8 tokens each together, or two replicas 64 each.
    for found in (cut, whole):
        assert (((128, 6144), BF16),) in found["npu_moe_token_unpermute"]
    # The shared expert is whole then.
    assert (((8, 2048), BF16),) in cut["npu_swiglu"]
    assert (((64, 256), BF16),) in whole["npu_swiglu"]


def test_a_wrong_result_is_told_with_what_it_should_be() -> None:
    shapes = StepShapes(Variant(model="glm-5.2").spec, MoeMethod.ALLGATHER, 3).expected()
    right = torch.empty(3, 64, 1, 64, dtype=BF16, device="meta")
    assert find_wrong_shape(shapes, "npu_interleave_rope", [right]) == ""
    assert "must be one of" in find_wrong_shape(shapes, "npu_interleave_rope", [right.float()])
    assert find_wrong_shape(shapes, "npu_interleave_rope", [right, right])


def test_every_variant_has_expectations() -> None:
    for variant in VARIANTS.values():
        assert StepShapes(variant.spec, variant.method, 7).expected()
