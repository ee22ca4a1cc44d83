"""Rotary angles by position."""

import torch

from services.worker.model.rope import RotaryTables


def tables(theta: float, max_positions: int) -> RotaryTables:
    return RotaryTables(
        dim=64,
        theta=theta,
        max_positions=max_positions,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_tables_repeat_32_angles_as_halves() -> None:
    cos, sin = tables(10000.0, 100).at(torch.tensor([0, 7]))
    assert cos.shape == sin.shape == (2, 1, 1, 64)
    assert torch.equal(cos[..., :32], cos[..., 32:])
    angles = 7 * 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    torch.testing.assert_close(cos[1, 0, 0, :32].double(), angles.cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[1, 0, 0, :32].double(), angles.sin(), atol=1e-6, rtol=0)


def test_the_last_position_of_a_long_context_has_its_own_angles() -> None:
    cos, _ = tables(8_000_000.0, 8192).at(torch.tensor([8190, 8191]))
    # float32 angles near 8191 are exact to 5e-4, which is the bound on their cosine.
    exact = torch.tensor([8190.0, 8191.0], dtype=torch.float64).cos()
    torch.testing.assert_close(cos[:, 0, 0, 0].double(), exact, atol=1e-3, rtol=0)
    assert cos[0, 0, 0, 0] != cos[1, 0, 0, 0]


def test_a_model_without_storage_has_tables_of_the_same_shape_and_type() -> None:
    def made(device: str) -> RotaryTables:
        return RotaryTables(
            dim=64,
            theta=10000.0,
            max_positions=100,
            dtype=torch.bfloat16,
            device=torch.device(device),
        )

    kept, absent = made("cpu"), made("meta")
    for name in ("_cos", "_sin"):
        one, other = getattr(kept, name), getattr(absent, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert other.is_meta
