"""Quantized experts against the integer formula of their scheme, one token and expert at a time."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from services.worker.model.experts import MixtureOfExperts, make_experts
from services.worker.model.experts_int4 import Int4Experts
from services.worker.model.experts_int8 import Int8Experts
from services.worker.model.placement import Placement
from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription, Scheme
from shared.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
NAMES = ("gate_proj", "up_proj", "down_proj")


def described(spec: ModelSpec, scheme: Scheme) -> ModelSpec:
    types = {
        f"experts.{expert}.{name}.weight": scheme.value
        for expert in range(spec.config.n_routed_experts)
        for name in NAMES
    }
    types |= {f"shared_experts.{name}.weight": "W8A8_DYNAMIC" for name in NAMES}
    return replace(spec, quantization=QuantDescription(source="d.json", types=types))


def random_weights(spec: ModelSpec, limit: int) -> Tensors:
    """Integers up to `limit` and a scale for each output, by expert and matrix."""
    config, generator = spec.config, torch.Generator().manual_seed(3)
    shapes = dict.fromkeys(NAMES[:2], (config.moe_intermediate_size, config.hidden_size))
    shapes["down_proj"] = (config.hidden_size, config.moe_intermediate_size)
    weights: Tensors = {}
    for expert in range(config.n_routed_experts):
        for name, (rows, columns) in shapes.items():
            key = f"experts.{expert}.{name}."
            integers = torch.randint(-limit, limit + 1, (rows, columns), generator=generator)
            weights[f"{key}weight"] = integers.to(torch.int8)
            scales = torch.rand(rows, 1, generator=generator) + 0.5
            weights[f"{key}weight_scale"] = scales / limit / columns**0.5
            weights[f"{key}weight_offset"] = torch.zeros(rows, 1)
    return weights


def packed(weights: Tensors) -> Tensors:
    """As the file holds int4: two outputs to a byte, and 8 times the weights' sums."""
    result = dict(weights)
    for name, integers in weights.items():
        if not name.endswith(".weight"):
            continue
        low, high = integers[0::2].int() & 15, integers[1::2].int() & 15
        result[name] = (low | high << 4).to(torch.uint8).view(torch.int8)
        scaled = 8 * integers.float() * weights[f"{name}_scale"]
        start = name.removesuffix("weight")
        result[f"{start}scale_bias"] = (
            scaled.view(len(scaled), 16, -1).sum(2)
            if "down_proj" in name
            else scaled.sum(1, keepdim=True)
        )
    return result


def load(experts: RoutedExperts, tensors: Tensors) -> None:
    for slot in experts.slots():
        assert tensors[slot.name].shape == slot.shape, slot.name
        slot.store(tensors[slot.name][slot.window or ...])
    experts.finish_loading()


def product(x: torch.Tensor, weights: Tensors, key: str) -> torch.Tensor:
    """One row by one matrix: the row in 8 bits by its largest value."""
    scale = x.abs().amax() / 127
    quantized = (x / scale).round()
    sums = weights[f"{key}weight"].double() @ quantized
    return sums * weights[f"{key}weight_scale"][:, 0].double() * scale


def expert_output(x: torch.Tensor, weights: Tensors, expert: int) -> torch.Tensor:
    gate, up = (product(x, weights, f"experts.{expert}.{name}.") for name in NAMES[:2])
    return product(functional.silu(gate) * up, weights, f"experts.{expert}.down_proj.")


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    experts = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(tokens)])
    return torch.rand(tokens, 2, generator=generator), experts.to(torch.int32)


CASES = [(Scheme.W8A8_DYNAMIC, 127), (Scheme.W4A8_DYNAMIC, 7)]


def tensors_of(spec: ModelSpec, scheme: Scheme, limit: int) -> tuple[Tensors, Tensors]:
    """Integers one to a byte, and as the file has them."""
    weights = random_weights(spec, limit)
    return weights, packed(weights) if scheme is Scheme.W4A8_DYNAMIC else weights


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


def test_int4_is_for_routed_experts_only(spec: ModelSpec) -> None:
    own = described(spec, Scheme.W8A8_DYNAMIC)
    types = dict(own.quantization.types)
    types |= {f"shared_experts.{name}.weight": "W4A8_DYNAMIC" for name in NAMES}
    own = replace(own, quantization=QuantDescription(source="d.json", types=types))
    with pytest.raises(CheckpointError, match="W4A8_DYNAMIC is served for routed experts only"):
        MixtureOfExperts(own, "")


def test_outputs_that_share_a_byte_stay_together(spec: ModelSpec) -> None:
    config = replace(spec.config, moe_intermediate_size=36, n_shared_experts=4)
    placement = Placement(tp_size=4)
    own = described(replace(spec, config=config, placement=placement), Scheme.W4A8_DYNAMIC)
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight: outputs that share"):
        list(make_experts(own, "experts.").slots())
