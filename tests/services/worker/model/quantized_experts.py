"""Random quantized experts, and the integer formula of their scheme for one token and expert."""

from dataclasses import replace

import torch
from torch.nn import functional

from services.worker.model.routed import RoutedExperts
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription, Scheme

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
