"""The layer norm against the float64 formula, in every version."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.ops import layer_norm, registry

EPSILON = 1e-6


@pytest.fixture(params=["torch", "compiled"])
def norms(request: pytest.FixtureRequest, compiled: dict[str, Any]) -> list[Callable[..., Tensor]]:
    if request.param == "torch":
        return [layer_norm.layer_norm]
    return [layer_norm.kernels(native)["layer_norm"] for native in compiled.values()]  # type: ignore[misc]


@pytest.mark.parametrize("width", [1, 31, 128])
def test_it_equals_the_formula(
    norms: list[Callable[..., Tensor]],
    width: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    x = (torch.randn(5, width + 3, generator=generator) * 3 + 1).to(dtype)[:, 2:-1]
    gamma, beta = (torch.randn(width, generator=generator).to(dtype) for _ in range(2))
    wide = x.double()
    centred = wide - wide.mean(1, keepdim=True)
    factor = (centred.square().mean(1, keepdim=True) + EPSILON).rsqrt()
    expected = centred * factor * gamma.double() + beta.double()
    # Float32 inside, one rounding of values up to 16 outside.
    bound = 2e-5 if dtype == torch.float32 else 2**-5
    for norm in norms:
        result = norm(x, gamma, beta, EPSILON)
        assert result.dtype is dtype
        torch.testing.assert_close(result.double(), expected, atol=bound, rtol=0)


def test_the_operator_takes_the_compiled_kernel(compiled: dict[str, Any]) -> None:
    registry.register()
    gone = torch.ops.glm.layer_norm(torch.ones(2, 4), torch.ones(4), torch.full((4,), 3.0), EPSILON)
    assert torch.equal(gone, torch.full((2, 4), 3.0))


def test_other_shapes_and_types_are_refused(compiled: dict[str, Any]) -> None:
    norm = layer_norm.kernels(next(iter(compiled.values())))["layer_norm"]
    ones = torch.ones(4)
    for arguments in (
        (torch.ones(2, 3, 4), ones, ones),
        (torch.ones(2, 4), ones, torch.ones(3)),
        (torch.ones(2, 4), ones.bfloat16(), ones),
        (torch.ones(2, 4), ones, torch.ones(8)[::2]),
    ):
        with pytest.raises(ValueError, match="layer_norm"):
            norm(*arguments, EPSILON)


def test_without_a_library_the_default_stands() -> None:
    assert layer_norm.kernels(None) == {}
    assert layer_norm.defaults() == {"layer_norm": layer_norm.layer_norm}
