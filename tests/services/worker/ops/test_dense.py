"""The ordinary products: right, and the same for a row whatever else is in the batch."""

from typing import Any

import pytest
import torch

from services.worker.ops import dense


@pytest.fixture
def linear(compiled: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return dense.kernels(next(iter(compiled.values())))["linear"]


@pytest.mark.parametrize("tokens", [1, 2, 7, 65])
@pytest.mark.parametrize(("inner", "outer"), [(192, 704), (33, 70), (128, 128)])
def test_product_equals_float64(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    inner: int,
    outer: int,
) -> None:
    wide = torch.randn((tokens, inner + 5), generator=generator).to(dtype)
    x = wide[:, 5:]  # rows lie apart, as in a slice of a fused projection
    weight = torch.randn((inner, outer), generator=generator).to(dtype)
    exact = x.double() @ weight.double()
    # float32: sums of 192 products in another order. bfloat16: one rounding of values near 14.
    bound = 1e-4 if dtype == torch.float32 else 2**-8
    for native in compiled.values():
        result = dense.kernels(native)["linear"](x, weight)
        torch.testing.assert_close(result.double(), exact, atol=bound * 4, rtol=bound)


def test_a_row_does_not_depend_on_its_batch(
    linear: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn((70, 192), generator=generator).to(dtype)
    weight = torch.randn((192, 300), generator=generator).to(dtype)
    together = linear(x, weight)
    for rows in (slice(0, 1), slice(3, 5), slice(60, 70)):
        assert torch.equal(linear(x[rows], weight), together[rows])


def test_sizes_that_do_not_match_are_refused(linear: Any) -> None:
    with pytest.raises(ValueError, match="differ in size"):
        linear(torch.zeros(1, 4), torch.zeros(5, 3))


@pytest.mark.parametrize(("tokens", "heads", "inner", "outer"), [(1, 4, 192, 512), (70, 2, 33, 40)])
def test_per_head_product_equals_float64(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    heads: int,
    inner: int,
    outer: int,
) -> None:
    wide = torch.randn((tokens, heads, inner + 8), generator=generator).to(dtype)
    x = wide[..., :inner]  # heads and tokens lie apart, as in a slice of the query
    weight = torch.randn((heads, inner, outer), generator=generator).to(dtype)
    exact = torch.einsum("thm,hmn->thn", x.double(), weight.double())
    # float32: sums of 192 products in another order. bfloat16: one rounding of values near 14.
    bound = 1e-4 if dtype == torch.float32 else 2**-8
    versions = [dense.kernels(native)["head_matmul"] for native in compiled.values()]
    for version in [dense.head_matmul, *versions]:
        result = version(x, weight)
        torch.testing.assert_close(result.double(), exact, atol=bound * 4, rtol=bound)
        assert result.is_contiguous()


def test_heads_that_do_not_match_are_refused(compiled: dict[str, Any]) -> None:
    head_matmul = dense.kernels(next(iter(compiled.values())))["head_matmul"]
    for shape in [(3, 4, 5), (2, 5, 5)]:
        with pytest.raises(ValueError, match="differ in size"):
            head_matmul(torch.zeros(1, 2, 4), torch.zeros(shape))


def test_without_compiled_kernels_the_defaults_stand() -> None:
    assert dense.kernels(None) == {}
    x, weight = torch.ones(2, 3), torch.ones(3, 4)
    assert torch.equal(dense.linear(x, weight), x @ weight)
