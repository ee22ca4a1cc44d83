"""Both forms of the key cache: what they write, and that they select nearly alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.model.cache_format import CacheFormat, Generation
from services.worker.model.key_cache import (
    PlainKeyCache,
    QuantizedKeyCache,
    hadamard,
    make_key_cache,
)
from services.worker.model.spec import ModelSpec
from services.worker.quant.scheme import QuantDescription
from shared.errors import ConfigError

LI = CacheFormat(sparse_li_c8=True)
TOKENS = 120
FIRST = 256  # the step's slots begin in block 2


def test_the_rotation_is_orthogonal_and_keeps_products() -> None:
    matrix = hadamard(128)
    assert matrix.abs().unique().numel() == 1
    assert torch.equal(matrix, matrix.t())
    torch.testing.assert_close(matrix @ matrix, torch.eye(128), atol=1e-6, rtol=0)
    # Sylvester: each quarter is the half-size matrix, the last one negated.
    half = hadamard(64) * 2**-0.5
    torch.testing.assert_close(matrix[64:], torch.cat((half, -half), 1))


def test_spec_and_description_choose_the_form(spec: ModelSpec) -> None:
    assert isinstance(make_key_cache(spec, 0), PlainKeyCache)
    assert isinstance(make_key_cache(replace(spec, cache=LI), 0), QuantizedKeyCache)
    listed = QuantDescription(
        source="description",
        types={"model.layers.2.self_attn.indexer.quant_type": "INT8_DYNAMIC"},
    )
    some = replace(spec, cache=LI, quantization=listed)
    assert isinstance(make_key_cache(some, 0), PlainKeyCache)
    assert isinstance(make_key_cache(some, 2), QuantizedKeyCache)


def test_more_positions_than_the_operator_selects_are_refused_at_start(spec: ModelSpec) -> None:
    wide = replace(spec, config=replace(spec.config, index_topk=3072))
    assert isinstance(make_key_cache(wide, 0), PlainKeyCache)
    with pytest.raises(ConfigError, match=r"index_topk=3072: at most 2048 with --enable-sparse-li"):
        make_key_cache(replace(wide, cache=LI), 0)


def rows_of(
    spec: ModelSpec, first_step: Callable[[int], Any], keys: torch.Tensor
) -> tuple[Any, kv_cache.LayerCache, Any]:
    """A form of the cache, its tensors with `keys` written, and the step."""
    step = first_step(TOKENS)[0]
    cache = kv_cache.allocate(spec, 3).layers[0]
    form = make_key_cache(spec, 0)
    form.write(keys.to(spec.dtype), step, cache)
    return form, cache, step


@pytest.mark.parametrize("generation", ["a3", "a5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_key_is_kept_rotated_with_its_scale(
    spec: ModelSpec,
    first_step: Callable[[int], Any],
    generation: Generation,
    dtype: torch.dtype,
) -> None:
    keys = torch.randn((TOKENS, 128), generator=torch.Generator().manual_seed(1)).to(dtype)
    spec = replace(spec, dtype=dtype, cache=replace(LI, generation=generation))
    _, cache, _ = rows_of(spec, first_step, keys)
    assert cache.indexer is not None
    assert cache.indexer_scale is not None
    kept = cache.indexer.view(-1, 128)[FIRST : FIRST + TOKENS].float()
    scales = cache.indexer_scale.view(-1, 1)[FIRST : FIRST + TOKENS].float()
    rotated = keys.float() @ hadamard(128)
    error = (kept * scales - rotated).abs()
    # Half a step of int8, or of float8; a scale in float16; a rotated lane in the model's type.
    step = 0.5 * scales if generation == "a3" else rotated.abs() / 16 + scales * 2**-10
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert bool((error <= step * 1.01 + (rounding + 2**-11) * rotated.abs().amax(1, True)).all())
    assert cache.indexer.view(torch.int8)[:2].count_nonzero() == 0
    assert cache.indexer_scale[:2].count_nonzero() == 0


def recall(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of the wanted positions [T, K] among those found."""
    pairs = zip(found.tolist(), wanted.tolist(), strict=True)
    shares = [len(set(ours) & set(theirs)) / len(theirs) for ours, theirs in pairs]
    return sum(shares) / len(shares)


@pytest.mark.parametrize(("generation", "expected"), [("a3", 0.95), ("a5", 0.9)])
def test_selections_are_nearly_those_of_plain_keys(
    spec: ModelSpec,
    first_step: Callable[[int], Any],
    generation: Generation,
    expected: float,
) -> None:
    """Random keys have no best ones that stand out: many scores lie next to the last selected."""
    generator = torch.Generator().manual_seed(4)
    heads = spec.config.index_n_heads
    keys = torch.randn((TOKENS, 128), generator=generator)
    # One lane far above the others, as keys of trained models have: the rotation spreads it.
    keys[:, 5] *= 20
    queries = torch.randn((TOKENS, heads, 128), generator=generator)
    weights = torch.rand((TOKENS, heads), generator=generator)
    selected = {}
    for name, cache in (("plain", CacheFormat()), ("c8", replace(LI, generation=generation))):
        form, tensors, step = rows_of(replace(spec, cache=cache), first_step, keys)
        selected[name] = form.select(queries.clone(), weights, step, tensors)
    width = spec.config.index_topk
    assert selected["c8"].shape == (TOKENS, 1, width)
    assert torch.equal(selected["c8"][:width], selected["plain"][:width]), "all are selected"
    shares = [
        len(set(ours.tolist()) & set(theirs.tolist())) / width
        for ours, theirs in zip(
            selected["c8"][width:, 0], selected["plain"][width:, 0], strict=True
        )
    ]
    assert sum(shares) / len(shares) >= expected


def test_without_the_rotation_an_outlying_lane_costs_the_selection(
    spec: ModelSpec, first_step: Callable[[int], Any]
) -> None:
    """What the rotation is for: the same keys, kept as they are, select worse."""
    generator = torch.Generator().manual_seed(4)
    heads = spec.config.index_n_heads
    keys = torch.randn((TOKENS, 128), generator=generator)
    keys[:, 5] *= 100
    queries = torch.randn((TOKENS, heads, 128), generator=generator)
    queries[..., 5] = 0  # and says nothing to a query
    weights = torch.rand((TOKENS, heads), generator=generator)

    def recall_with(rotation: torch.Tensor) -> float:
        chosen = []
        for cache in (LI, CacheFormat()):
            special = replace(spec, cache=cache)
            form = make_key_cache(special, 0)
            if isinstance(form, QuantizedKeyCache):
                form._rotation.copy_(rotation)
            step, tensors = first_step(TOKENS)[0], kv_cache.allocate(special, 3).layers[0]
            form.write(keys, step, tensors)
            chosen.append(form.select(queries.clone(), weights, step, tensors)[16:, 0])
        return recall(*chosen)

    assert recall_with(hadamard(128)) > recall_with(torch.eye(128)) + 0.05
