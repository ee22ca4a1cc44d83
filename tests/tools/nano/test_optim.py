"""The optimiser: orthogonal updates, per head, and nothing for what had no gradient."""

import torch
from torch import nn

from tools.nano.optim import Slot, orthogonal, update


def _slot(name: str, shape: tuple[int, ...], gradient: torch.Tensor) -> Slot:
    parameter = nn.Parameter(torch.zeros(shape))
    zeros = [torch.zeros(shape) for _ in range(3)]
    return Slot(name, parameter, [gradient, gradient], *zeros)


def test_singular_values_become_nearly_one() -> None:
    for shape in ((4, 96, 512), (8, 192, 64), (1, 64, 64)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 1e-3))
        assert values.max() < 1.3
        assert values.median() > 0.5


def test_one_step_moves_each_head_alike_whatever_its_gradient() -> None:
    gradient = torch.randn(192, 256)
    gradient[:, :64] *= 1e-3
    slot = _slot("layers.0.self_attn.o_proj.weight", (192, 256), gradient)
    update([slot], step=1, rates={"trunk": 1.0}, heads=4, decay=0.9)
    sizes = slot.parameter.detach().unflatten(1, (4, 64)).norm(dim=(0, 2))
    assert sizes.max() / sizes.min() < 1.2


def test_parameters_without_gradient_stay() -> None:
    slot = _slot("norm.weight", (8,), torch.zeros(8))
    update([slot], step=1, rates={"trunk": 1.0}, heads=4, decay=0.9)
    assert not slot.parameter.any()


def test_average_follows_the_parameter() -> None:
    slot = _slot("norm.weight", (8,), torch.ones(8))
    update([slot], step=1, rates={"trunk": 1.0}, heads=4, decay=0.9)
    torch.testing.assert_close(slot.average, 0.1 * slot.parameter.detach())
