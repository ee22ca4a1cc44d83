"""The optimiser: Muon for matrices, Adam for embeddings, head, router and norms.

Works on parameters, gradients and moments that two processes share; each process updates its half.
Matrices that hold several heads or experts are made orthogonal one head or expert at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

ADAM_RATES = {"embed_tokens": 0.01, "lm_head": 0.005}
ADAM_RATE = 0.003
MUON_RATE = 0.02
MUON_MOMENTUM = 0.95
WEIGHT_DECAY = 0.05


@dataclass(slots=True)
class Slot:
    """One parameter with its shared gradient sum and moments."""

    name: str
    parameter: nn.Parameter
    gradients: list[Tensor]
    first: Tensor
    second: Tensor
    average: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether Muon takes it."""
        special = ("embed_tokens", "lm_head", "gate.weight", "weights_proj")
        return self.parameter.dim() >= 2 and not any(part in self.name for part in special)

    @property
    def part(self) -> str:
        """What it belongs to: the trunk, the indexers or the MTP layer."""
        if ".indexer." in self.name:
            return "indexer"
        return "mtp" if self.name.startswith("mtp.") else "trunk"


def _blocks(name: str, update: Tensor, heads: int) -> Tensor:
    """Views a matrix as a batch of independent ones, [n, rows, columns]."""
    if update.dim() == 3:
        return update
    if "q_b_proj" in name or "kv_b_proj" in name or "wq_b" in name:
        count = 8 if "wq_b" in name else heads
        return update.unflatten(0, (count, -1))
    if "o_proj" in name:
        return update.unflatten(1, (heads, -1)).transpose(0, 1)
    return update.unsqueeze(0)


def orthogonal(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """Replaces each matrix by a nearly orthogonal one, by Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    size = matrices.norm(dim=(-2, -1), keepdim=True)  # in float32: bfloat16 sums stall far too low
    x = (matrices / (1.02 * size + 1e-7)).bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).float()


@torch.no_grad()
def muon_step(slot: Slot, gradient: Tensor, rate: float, heads: int) -> None:
    """Takes one Muon step with Nesterov momentum and a little decay."""
    slot.first.mul_(MUON_MOMENTUM).add_(gradient)
    update = gradient + MUON_MOMENTUM * slot.first
    blocks = _blocks(slot.name, update, heads)
    scale = max(1.0, blocks.shape[-2] / blocks.shape[-1]) ** 0.5
    result = orthogonal(blocks) * scale
    if "o_proj" in slot.name:
        result = result.transpose(0, 1).flatten(1)
    slot.parameter.mul_(1 - WEIGHT_DECAY * rate * MUON_RATE)
    slot.parameter.sub_(MUON_RATE * rate * result.reshape(slot.parameter.shape))


@torch.no_grad()
def adam_step(slot: Slot, gradient: Tensor, rate: float, step: int) -> None:
    """Takes one Adam step."""
    beta1, beta2 = 0.9, 0.95
    slot.first.lerp_(gradient, 1 - beta1)
    slot.second.lerp_(gradient.square(), 1 - beta2)
    first = slot.first / (1 - beta1**step)
    second = slot.second / (1 - beta2**step)
    size = next((value for part, value in ADAM_RATES.items() if part in slot.name), ADAM_RATE)
    slot.parameter.sub_(rate * size * first / (second.sqrt() + 1e-8))


@torch.no_grad()
def update(
    slots: list[Slot], *, step: int, rates: dict[str, float], heads: int, decay: float
) -> None:
    """Updates parameters and their running averages from the mean of the gradients.

    ``rates`` has a factor for each part of `Slot.part`; a part whose factor is zero stays.
    """
    for slot in slots:
        rate = rates[slot.part]
        gradient = torch.stack(slot.gradients).mean(0)
        if rate == 0.0 or not gradient.any():
            continue
        if slot.is_matrix:
            muon_step(slot, gradient, rate, heads)
        else:
            adam_step(slot, gradient, rate, step)
    for slot in slots:
        slot.average.lerp_(slot.parameter, 1 - decay)
