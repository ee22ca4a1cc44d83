"""Two weights in a byte, and the compensation that a device needs for them."""

import pytest
import torch
from torch import Tensor

from services.worker.quant import int4
from shared.errors import CheckpointError


def levels(size_out: int = 32, size_in: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-8, 8, (size_out, size_in), generator=generator, dtype=torch.int8)


def test_the_even_output_is_in_the_low_half_in_twos_complement() -> None:
    packed = int4.pack(torch.tensor([[1, -1], [-8, 7]], dtype=torch.int8))
    assert packed.view(torch.uint8).tolist() == [[0x81, 0x7F]]


def test_every_pair_of_levels_comes_back() -> None:
    pairs = torch.cartesian_prod(*[torch.arange(-8, 8, dtype=torch.int8)] * 2).t().contiguous()
    assert torch.equal(int4.unpack(int4.pack(pairs)), pairs)


def test_four_packed_bytes_are_eight_outputs_with_the_lowest_first() -> None:
    column = levels(size_in=1)[:8]
    word = int(int4.pack(column).flatten().view(torch.int32))
    halves = [(word >> 4 * place) & 0xF for place in range(8)]
    assert [half - 16 * (half > 7) for half in halves] == column.flatten().tolist()


def test_the_compensation_gives_back_what_the_device_leaves_out() -> None:
    weight, scales = levels(), torch.rand(32, 1)
    activations = torch.randint(-128, 128, (5, 48))
    high, low = activations // 16, activations % 16 - 8
    assert torch.equal(16 * high + low + 8, activations)
    left_out = (16 * high + low) @ weight.long().t() * scales.t()
    bias = int4.compensation(weight, scales, is_down=False)
    assert bias.shape == (32, 1)
    whole = activations @ weight.long().t() * scales.t()
    # Products are exact; two roundings of numbers below 2^18 times a scale below 1.
    torch.testing.assert_close(left_out + bias.t(), whole, rtol=0, atol=2**18 * 2**-23)


def test_a_down_projection_is_compensated_by_sixteenths_of_its_input() -> None:
    weight, scales = levels(), torch.rand(32, 1)
    parts = int4.compensation(weight, scales, is_down=True)
    assert parts.shape == (32, 16)
    assert parts.dtype == torch.float32
    sums = weight[:, 3:6].sum(1, dtype=torch.float32)
    torch.testing.assert_close(parts[:, 1], 8 * sums * scales[:, 0])
    torch.testing.assert_close(
        parts.sum(1, keepdim=True), int4.compensation(weight, scales, is_down=False)
    )


def test_sizes_that_cannot_be_packed_are_named() -> None:
    int4.check_sizes("up_proj", 8, 3, is_down=False)
    with pytest.raises(CheckpointError, match=r"up_proj: has 12 outputs, .* multiple of 8"):
        int4.check_sizes("up_proj", 12, 16, is_down=False)
    with pytest.raises(CheckpointError, match=r"down_proj: has 24 inputs, .* multiple of 16"):
        int4.check_sizes("down_proj", 8, 24, is_down=True)
