"""Interleaved rotation against complex multiplication."""

from typing import Any

import pytest
import torch


def test_rotation_equals_complex_multiplication(
    kernels: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    wide = torch.randn((6, 3, 100), generator=generator).to(dtype)
    x = wide[..., 36:].unsqueeze(2)  # the rotary part of each head's query
    angles = torch.rand((6, 32), generator=generator) * 6
    both = torch.cat((angles, angles), -1).view(6, 1, 1, 64)
    cos, sin = both.cos().to(dtype), both.sin().to(dtype)
    rotated = kernels["npu_interleave_rope"](x, cos, sin)
    pairs = torch.view_as_complex(x.float().reshape(6, 3, 32, 2).contiguous())
    turn = torch.complex(cos.float(), sin.float()).view(6, 1, 64)[..., :32]
    turned = pairs * turn
    exact = torch.cat((turned.real, turned.imag), -1).unsqueeze(2)
    bound = 1e-5 if dtype == torch.float32 else 2**-7  # one rounding, values up to 4
    torch.testing.assert_close(rotated.float(), exact, atol=bound, rtol=bound)


def test_another_rotary_size_is_refused(kernels: Any) -> None:
    with pytest.raises(ValueError, match="32"):
        kernels["npu_interleave_rope"](
            torch.zeros((1, 1, 1, 32)), torch.zeros((1, 1, 1, 64)), torch.zeros((1, 1, 1, 64))
        )
