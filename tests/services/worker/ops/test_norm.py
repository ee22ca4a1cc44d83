"""RMS norms against the float64 formula."""

from typing import Any

import pytest
import torch


def formula(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * gamma.double()


def bound(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2**-7  # one rounding, values up to 4


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_rms_norm_equals_the_formula(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator, epsilon: float
) -> None:
    wide = torch.randn((5, 100), generator=generator).to(dtype)
    x = wide[:, 3:51]  # rows lie apart, as in a slice of the fused projection
    gamma = torch.randn(48, generator=generator).to(dtype)
    normed, factors = kernels["npu_rms_norm"](x, gamma, epsilon)
    exact = formula(x, gamma, epsilon)
    torch.testing.assert_close(normed.double(), exact, atol=bound(dtype), rtol=bound(dtype))
    assert factors.shape == (5, 1)
    assert factors.dtype == torch.float32


def test_add_rms_norm_returns_norm_and_sum(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x1, x2 = (torch.randn((7, 64), generator=generator).to(dtype) for _ in range(2))
    gamma = torch.randn(64, generator=generator).to(dtype)
    normed, _, total = kernels["npu_add_rms_norm"](x1, x2, gamma, 1e-5)
    assert torch.equal(total, x1 + x2)
    exact = formula(x1 + x2, gamma, 1e-5)
    torch.testing.assert_close(normed.double(), exact, atol=bound(dtype), rtol=bound(dtype))


def test_a_zero_row_stays_zero(kernels: Any, dtype: torch.dtype) -> None:
    normed, _ = kernels["npu_rms_norm"](
        torch.zeros((2, 16), dtype=dtype), torch.ones(16, dtype=dtype), 1e-5
    )
    assert normed.count_nonzero() == 0


def test_gamma_of_another_size_is_refused(compiled: dict[str, Any]) -> None:
    from services.worker.ops import registry

    kernels = registry.cpu_kernels(next(iter(compiled.values())))
    with pytest.raises(ValueError, match="gamma"):
        kernels["npu_rms_norm"](torch.zeros((2, 16)), torch.ones(8), 1e-5)
