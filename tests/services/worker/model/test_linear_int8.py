"""Int8 projections against the integer formulas of their schemes."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from services.worker.model.linear import Projection
from services.worker.model.linear_int8 import DynamicInt8Linear, StaticInt8Linear
from services.worker.model.placement import WHOLE, Placement
from services.worker.model.shards import Cut, Shards
from services.worker.model.spec import ModelSpec
from shared.errors import CheckpointError

IN, OUT = 64, 24
Tensors = dict[str, torch.Tensor]


def shards(cut: Cut = Cut.WHOLE, placement: Placement = WHOLE) -> Shards:
    return Shards.cut(placement, "p.", {"w": OUT}, IN, cut)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def dynamic() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-127, 128, (OUT, IN), generator=generator, dtype=torch.int8)
    scale = torch.rand(OUT, 1, generator=generator) * 0.01 + 0.001
    return {"p.w.weight": weight, "p.w.weight_scale": scale, "p.w.weight_offset": scale * 0}


@pytest.fixture
def static(dynamic: Tensors) -> Tensors:
    """Inputs of -3 to 5 in 8 bits: scale 1/32, zero point -32."""
    weight = dynamic["p.w.weight"]
    return {
        "p.w.weight": weight,
        "p.w.input_scale": torch.tensor([1 / 32]),
        "p.w.input_offset": torch.tensor([-32.0]),
        "p.w.deq_scale": dynamic["p.w.weight_scale"][:, 0] / 32,
        "p.w.quant_bias": (32 * weight.int().sum(1)).to(torch.int32),
    }


def load(projection: Projection, tensors: Tensors) -> None:
    for slot in projection.slots():
        assert slot.name in tensors or not slot.is_required, slot.name
        if slot.name in tensors:
            assert tensors[slot.name].shape == slot.shape
            slot.store(tensors[slot.name][slot.window or ...])
    projection.finish_loading()


def dynamic_formula(x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    scales = x.double().abs().amax(1, keepdim=True) / 127
    quantized = (x.double() / scales).round()
    sums = quantized @ tensors["p.w.weight"].double().T
    return sums * tensors["p.w.weight_scale"].double().T * scales


def static_formula(x: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    scaled = x.double() / tensors["p.w.input_scale"] + tensors["p.w.input_offset"]
    sums = scaled.round().clamp(-128, 127) @ tensors["p.w.weight"].double().T
    return (sums + tensors["p.w.quant_bias"]) * tensors["p.w.deq_scale"].double()


def test_a_row_is_quantized_by_its_own_largest_value(
    spec: ModelSpec, x: torch.Tensor, dynamic: Tensors
) -> None:
    linear = DynamicInt8Linear(spec, shards())
    load(linear, dynamic)
    # The sums are exact; two scales in float32.
    expected = dynamic_formula(x, dynamic).float()
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-6)


def test_all_rows_are_quantized_by_one_scale_and_zero_point(
    spec: ModelSpec, x: torch.Tensor, static: Tensors
) -> None:
    linear = StaticInt8Linear(spec, shards())
    load(linear, static)
    expected = static_formula(x, static).float()
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-6)


def test_a_scale_that_bfloat16_cannot_hold_is_made_up_for(
    spec: ModelSpec, x: torch.Tensor, static: Tensors
) -> None:
    """1 / 0.0313 is 31.949 and in bfloat16 32: the result must not be off by that."""
    static["p.w.input_scale"] = torch.tensor([0.0313])
    static["p.w.deq_scale"] = static["p.w.deq_scale"] * 32 * 0.0313
    linear = StaticInt8Linear(replace(spec, dtype=torch.bfloat16), shards())
    load(linear, static)
    assert float(linear.input_scale_reciprocal) == 32.0
    rows = x.bfloat16()
    as_if_exact = static | {
        "p.w.input_scale": torch.tensor([1 / 32]),
        "p.w.deq_scale": static["p.w.deq_scale"] / 32 / 0.0313,
    }
    expected = static_formula(rows, as_if_exact)
    # Rounding of the result to bfloat16.
    torch.testing.assert_close(linear(rows).double(), expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("cut", [Cut.OUTPUTS, Cut.INPUTS])
def test_static_ranks_together_give_the_whole_result(
    spec: ModelSpec, x: torch.Tensor, static: Tensors, cut: Cut
) -> None:
    results = []
    for rank in range(4):
        part = shards(cut, Placement(tp_size=4, tp_rank=rank))
        linear = StaticInt8Linear(spec, part)
        load(linear, static)
        results.append(linear(x[:, part.parts[0].columns]))
    joined = torch.cat(results, 1) if cut is Cut.OUTPUTS else torch.stack(results).sum(0)
    expected = static_formula(x, static).float()
    torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-5)


def test_dynamic_ranks_side_by_side_give_the_whole_result(
    spec: ModelSpec, x: torch.Tensor, dynamic: Tensors
) -> None:
    results = []
    for rank in range(4):
        linear = DynamicInt8Linear(spec, shards(Cut.OUTPUTS, Placement(tp_size=4, tp_rank=rank)))
        load(linear, dynamic)
        results.append(linear(x))
    expected = dynamic_formula(x, dynamic).float()
    torch.testing.assert_close(torch.cat(results, 1), expected, rtol=1e-6, atol=1e-6)


def test_dynamic_ranks_that_share_the_inputs_stay_within_the_rounding(
    spec: ModelSpec, x: torch.Tensor, dynamic: Tensors
) -> None:
    """Each rank quantizes its part of a row by that part's largest value."""
    results = []
    for rank in range(4):
        part = shards(Cut.INPUTS, Placement(tp_size=4, tp_rank=rank))
        linear = DynamicInt8Linear(spec, part)
        load(linear, dynamic)
        results.append(linear(x[:, part.parts[0].columns]))
    matrix = dynamic["p.w.weight"].double() * dynamic["p.w.weight_scale"].double()
    error = (torch.stack(results).sum(0).double() - x.double() @ matrix.T).abs()
    # Half a step of the row's scale for each input.
    bound = x.abs().amax(1, keepdim=True).double() / 254 * matrix.abs().sum(1)
    assert bool((error <= bound).all())


def test_weights_with_a_zero_point_are_refused(spec: ModelSpec, dynamic: Tensors) -> None:
    dynamic["p.w.weight_offset"] = dynamic["p.w.weight_offset"] + 1
    with pytest.raises(CheckpointError, match=r"p\.w\.weight_offset: .*zero point"):
        load(DynamicInt8Linear(spec, shards()), dynamic)


def test_layers_with_one_input_must_quantize_it_alike(spec: ModelSpec, static: Tensors) -> None:
    both = Shards.cut(WHOLE, "p.", {"w": OUT, "v": OUT}, IN, Cut.WHOLE)
    second = {name.replace("p.w.", "p.v."): tensor for name, tensor in static.items()}
    load(StaticInt8Linear(spec, both), static | second)
    second["p.v.input_offset"] = torch.tensor([-31.0])
    with pytest.raises(CheckpointError, match=r"p\.w\.input_offset is -32.*p\.v\.input_offset"):
        load(StaticInt8Linear(spec, both), static | second)


@pytest.mark.parametrize("make", [DynamicInt8Linear, StaticInt8Linear])
def test_without_the_blocked_layout_the_result_is_the_same(
    spec: ModelSpec,
    x: torch.Tensor,
    dynamic: Tensors,
    static: Tensors,
    make: Callable[[ModelSpec, Shards], Projection],
) -> None:
    tensors = dynamic if make is DynamicInt8Linear else static
    results = []
    for mode in (0, 1):
        linear = make(replace(spec, weight_nz_mode=mode), shards())
        load(linear, tensors)
        results.append(linear(x))
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [0.0, -1.0])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (DynamicInt8Linear, "weight_scale"),
        (StaticInt8Linear, "deq_scale"),
        (StaticInt8Linear, "input_scale"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    spec: ModelSpec,
    dynamic: Tensors,
    static: Tensors,
    make: Callable[[ModelSpec, Shards], Projection],
    name: str,
    value: float,
) -> None:
    tensors = dict(dynamic if make is DynamicInt8Linear else static)
    tensors[f"p.w.{name}"] = tensors[f"p.w.{name}"] * value
    with pytest.raises(CheckpointError, match=rf"p\.w\.{name}: scales must be above 0"):
        load(make(spec, shards()), tensors)


def test_a_row_of_zero_weights_may_have_scale_zero(spec: ModelSpec, dynamic: Tensors) -> None:
    dynamic["p.w.weight_scale"][3] = 0.0
    load(DynamicInt8Linear(spec, shards()), dynamic)


@pytest.mark.parametrize("offset", [500.0, -129.0, 0.5])
def test_a_zero_point_outside_int8_is_refused(
    spec: ModelSpec, static: Tensors, offset: float
) -> None:
    static["p.w.input_offset"] = torch.tensor([offset])
    with pytest.raises(CheckpointError, match=r"p\.w\.input_offset: .*whole number"):
        load(StaticInt8Linear(spec, shards()), static)
