"""The ordinary products: right, and the same for a row whatever else is in the batch."""

from typing import Any

import pytest
import torch

from services.worker.ops import dense, nz


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


def test_a_row_depends_on_neither_threads_nor_chunks(
    compiled: dict[str, Any], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = torch.randn((230, 130), generator=generator).to(dtype)
    weight = torch.randn((130, 170), generator=generator).to(dtype)  # enough for several threads
    for native in compiled.values():
        kernels = dense.kernels(native)
        packed = kernels["pack_weight"](weight)
        together = kernels["linear"](x, packed)
        native.set_num_threads(3)
        try:
            assert torch.equal(kernels["linear"](x, packed), together)
            assert torch.equal(kernels["linear"](x, weight), together)
        finally:
            native.set_num_threads(1)
        for rows in (slice(0, 1), slice(90, 103), slice(229, 230)):
            assert torch.equal(kernels["linear"](x[rows], packed), together[rows])


@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 100])
@pytest.mark.parametrize(("inner", "outer"), [(192, 256), (33, 70), (1, 1), (64, 129), (7, 31)])
def test_a_packed_weight_gives_the_same_bits_as_a_plain_one(
    compiled: dict[str, Any],
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    inner: int,
    outer: int,
) -> None:
    x = torch.randn((tokens, 2, inner + 1), generator=generator).to(dtype)[..., :inner]
    weight = torch.randn((2, inner, outer), generator=generator).to(dtype)
    for native in compiled.values():
        kernels = dense.kernels(native)
        one, both = kernels["pack_weight"](weight[1]), kernels["pack_weight"](weight)
        assert nz.is_nz(one)
        assert torch.equal(nz.unpack(both), weight)
        assert torch.equal(kernels["linear"](x[:, 1], one), kernels["linear"](x[:, 1], weight[1]))
        assert torch.equal(kernels["head_matmul"](x, both), kernels["head_matmul"](x, weight))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_row_without_a_partner_meets_no_neighbour_of_its_value(
    compiled: dict[str, Any], dtype: torch.dtype, value: float
) -> None:
    """Behind the last value of a row of odd length lies another row's first one."""
    wide = torch.full((2, 8), value, dtype=dtype)
    wide[:, :3] = 1
    weight = torch.ones(3, 40, dtype=dtype)
    for native in compiled.values():
        kernels = dense.kernels(native)
        for form in (weight, kernels["pack_weight"](weight)):
            assert torch.equal(
                kernels["linear"](wide[:, :3], form), torch.full((2, 40), 3).to(dtype)
            )


@pytest.mark.parametrize(
    "misuse",
    [
        lambda packed: packed[:, :32],
        lambda packed: packed[8:],
        lambda packed: packed.t(),
        torch.clone,
    ],
)
def test_parts_and_copies_of_a_packed_weight_are_refused(
    compiled: dict[str, Any], dtype: torch.dtype, misuse: Any
) -> None:
    for native in compiled.values():
        kernels = dense.kernels(native)
        wrong = misuse(kernels["pack_weight"](torch.ones((64, 64), dtype=dtype)))
        with pytest.raises(ValueError, match=r"was cut or copied|is not contiguous"):
            kernels["linear"](torch.ones((1, wrong.shape[0]), dtype=dtype), wrong)


def test_a_weight_is_packed_once_and_an_empty_one_not_at_all(
    compiled: dict[str, Any], dtype: torch.dtype
) -> None:
    pack = dense.kernels(next(iter(compiled.values())))["pack_weight"]
    packed = pack(torch.ones((2, 3), dtype=dtype))
    assert pack(packed) is packed
    nothing = torch.ones((0, 3, 4), dtype=dtype)
    assert pack(nothing) is nothing


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
    assert dense.pack_weight(weight) is weight
