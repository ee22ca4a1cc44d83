"""Quantized experts against the integer formula of their scheme, one token and expert at a time.

What holds for both widths is here; what only packed weights do is in `test_experts_int4.py`.
"""

from dataclasses import replace

import pytest
import torch

from services.worker.model.experts import make_experts
from services.worker.model.experts_int4 import Int4Experts
from services.worker.model.experts_int8 import Int8Experts
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import Scheme
from shared.errors import CheckpointError
from tests.services.worker.model.quantized_experts import (
    CASES,
    described,
    expert_output,
    load,
    routing,
    tensors_of,
)


@pytest.mark.parametrize(("scheme", "limit"), CASES)
@pytest.mark.parametrize("tokens", [1, 33])
def test_the_block_is_the_weighted_sum_of_integer_products(
    spec: ModelSpec, scheme: Scheme, limit: int, tokens: int
) -> None:
    weights, tensors = tensors_of(spec, scheme, limit)
    block = make_experts(described(spec, scheme), "experts.")
    load(block, tensors)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, spec.config.hidden_size, generator=generator)
    shares, chosen = routing(tokens)
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(tokens):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            expected[token] += share * expert_output(x[token].double(), weights, expert)
    # A value on the edge between two steps of the second quantization may fall to the other side:
    # one step of 1/127 of a hidden row for one of 32 inputs.
    torch.testing.assert_close(block(x, shares, chosen).double(), expected, atol=2e-2, rtol=0)
    error = (block(x, shares, chosen).double() - expected).abs()
    assert error.median() < 1e-5


@pytest.mark.parametrize(("scheme", "limit"), CASES)
def test_without_the_blocked_layout_the_result_is_the_same(
    spec: ModelSpec, scheme: Scheme, limit: int
) -> None:
    _, tensors = tensors_of(spec, scheme, limit)
    x = torch.randn(9, spec.config.hidden_size, generator=torch.Generator().manual_seed(5))
    results = []
    for mode in (0, 1):
        block = make_experts(replace(described(spec, scheme), weight_nz_mode=mode), "experts.")
        load(block, tensors)
        results.append(block(x, *routing(9)))
    assert torch.equal(*results)


@pytest.mark.parametrize(("scheme", "limit"), CASES)
def test_experts_of_all_ranks_add_up(spec: ModelSpec, scheme: Scheme, limit: int) -> None:
    _, tensors = tensors_of(spec, scheme, limit)
    whole = make_experts(described(spec, scheme), "experts.")
    load(whole, tensors)
    x = torch.randn(9, spec.config.hidden_size, generator=torch.Generator().manual_seed(5))
    shares, chosen = routing(9)
    total = torch.zeros_like(x)
    for rank in range(3):
        placement = Placement(tp_size=1, ep_size=3, ep_rank=rank)
        own = described(replace(spec, placement=placement), scheme)
        block = make_experts(own, "experts.")
        load(block, tensors)
        held = torch.zeros(8, dtype=torch.bool)
        held[placement.experts(8).start : placement.experts(8).stop] = True
        total += block(x, shares * held[chosen.long()], chosen)
    torch.testing.assert_close(total, whole(x, shares, chosen), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scheme", "limit"), CASES)
def test_parts_of_experts_stay_within_the_rounding(
    spec: ModelSpec, scheme: Scheme, limit: int
) -> None:
    """Without expert parallelism each rank has a part of every expert's width."""
    _, tensors = tensors_of(spec, scheme, limit)
    whole = make_experts(described(spec, scheme), "experts.")
    load(whole, tensors)
    x = torch.randn(9, spec.config.hidden_size, generator=torch.Generator().manual_seed(5))
    total = torch.zeros_like(x)
    for rank in range(4):
        placement = Placement(tp_size=4, tp_rank=rank)
        block = make_experts(described(replace(spec, placement=placement), scheme), "experts.")
        load(block, tensors)
        total += block(x, *routing(9))
    # Steps of 1/127 of each part's own largest hidden value.
    torch.testing.assert_close(total, whole(x, *routing(9)), atol=5e-2, rtol=0)


def test_each_scheme_has_its_kind_and_others_are_refused(spec: ModelSpec) -> None:
    assert isinstance(make_experts(described(spec, Scheme.W8A8_DYNAMIC), "experts."), Int8Experts)
    assert isinstance(make_experts(described(spec, Scheme.W4A8_DYNAMIC), "experts."), Int4Experts)
    with pytest.raises(CheckpointError, match=r"d\.json: experts\.: W8A8 is not served"):
        make_experts(described(spec, Scheme.W8A8), "experts.")
