"""Both forms of the latent cache: what they write, and that they attend alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker import kv_cache
from services.worker.kv_cache import LayerCache
from services.worker.model.cache_format import CacheFormat
from services.worker.model.latent_cache import (
    PackedLatentCache,
    PlainLatentCache,
    make_latent_cache,
)
from services.worker.model.norm import RMSNorm
from services.worker.model.spec import ModelSpec
from services.worker.model.step import StepInputs

SFA = CacheFormat(sparse_sfa_c8=True)
TOKENS = 12
FIRST = 256  # the step's slots begin in block 2


def make_norm(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(512, 1e-5, dtype, torch.device("cpu"))
    norm.weight.copy_(1 + 0.1 * torch.randn(512, generator=torch.Generator().manual_seed(1)))
    return norm


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def both(
    request: pytest.FixtureRequest, spec: ModelSpec, first_step: Callable[[int], Any]
) -> dict[str, Any]:
    """The same rows written to a plain and to a packed cache of one layer."""
    spec = replace(spec, dtype=request.param)
    norm = make_norm(spec.dtype)
    step: StepInputs = first_step(TOKENS)[0]
    step = replace(step, cos=step.cos.to(spec.dtype), sin=step.sin.to(spec.dtype))
    wide = torch.randn((TOKENS, 700), generator=torch.Generator().manual_seed(2)).to(spec.dtype)
    kv = wide[:, 100:676]  # a part of the fused projection
    made: dict[str, Any] = {"step": step, "spec": spec}
    for name, cache in (("plain", CacheFormat()), ("packed", SFA)):
        form = replace(spec, cache=cache)
        made[name] = make_latent_cache(form, norm)
        made[f"{name}_rows"] = kv_cache.allocate(form, 3).layers[1]
        made[name].write(kv, step, made[f"{name}_rows"])
    return made


def unpacked(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, rotated keys and scales of the step's rows."""
    rows = cache.latent.view(torch.int8).view(-1, 656)[FIRST : FIRST + TOKENS]
    lanes, rope, scales = (part.contiguous() for part in rows.split([512, 128, 16], 1))
    scales = scales.view(torch.float32)
    latent = lanes.view(cache.latent.dtype).float().view(-1, 4, 128) * scales[..., None]
    return latent.view(-1, 512), rope.view(torch.bfloat16), scales


def test_the_spec_chooses_the_form(spec: ModelSpec) -> None:
    norm = make_norm(torch.float32)
    assert isinstance(make_latent_cache(spec, norm), PlainLatentCache)
    assert isinstance(make_latent_cache(replace(spec, cache=SFA), norm), PackedLatentCache)


def test_a_packed_row_holds_what_the_plain_caches_hold(both: dict[str, Any]) -> None:
    plain: LayerCache = both["plain_rows"]
    assert plain.rope is not None
    latent, rope, scales = unpacked(both["packed_rows"])
    expected = plain.latent.view(-1, 512)[FIRST : FIRST + TOKENS].float()
    # Half a step of the tile's scale. The two norms may round apart by one step of the type.
    rounding = 2**-7 if both["spec"].dtype == torch.bfloat16 else 1e-5
    allowed = 0.5 * scales.repeat_interleave(128, 1) + rounding * expected.abs()
    assert bool(((latent - expected).abs() <= allowed).all())
    keys = plain.rope.view(-1, 64)[FIRST : FIRST + TOKENS]
    # A row's rotary lanes are bfloat16 in a float32 model too.
    torch.testing.assert_close(rope, keys.to(torch.bfloat16), atol=0, rtol=2**-7)
    assert both["packed_rows"].latent.view(-1, 656)[:FIRST].count_nonzero() == 0


def test_both_forms_attend_alike(both: dict[str, Any]) -> None:
    spec, step = both["spec"], both["step"]
    generator = torch.Generator().manual_seed(3)
    heads = spec.config.num_attention_heads
    absorbed, rotated = (
        torch.randn((TOKENS, heads, width), generator=generator).to(spec.dtype)
        for width in (512, 64)
    )
    topk = torch.full((TOKENS, 1, 16), -1, dtype=torch.int32)
    for token in range(TOKENS):
        topk[token, 0, : token + 1] = torch.arange(token + 1)
    outputs = {
        name: both[name].attend(absorbed, rotated, step, both[f"{name}_rows"], topk)
        for name in ("plain", "packed")
    }
    assert outputs["packed"].shape == (TOKENS, heads, 512)
    # A lane is off by up to 1/254 of its tile's largest, about 0.012; logits by 512 of those at
    # random times a query of size 1 and the scale of 0.1: about 0.01. So values near 1 by 0.03.
    torch.testing.assert_close(
        outputs["packed"].float(), outputs["plain"].float(), atol=0.06, rtol=0.02
    )
    # A token alone attends to itself: its own latent comes back.
    latent, _, _ = unpacked(both["packed_rows"])
    torch.testing.assert_close(
        outputs["packed"][0].float(), latent[:1].expand(heads, -1), atol=1e-5, rtol=2**-7
    )


def test_rows_of_an_a5_are_float8(spec: ModelSpec, first_step: Callable[[int], Any]) -> None:
    spec = replace(spec, cache=replace(SFA, generation="a5"))
    step = first_step(TOKENS)[0]
    cache = kv_cache.allocate(spec, 3).layers[0]
    kv = torch.randn((TOKENS, 576), generator=torch.Generator().manual_seed(2))
    norm = make_norm(torch.float32)
    make_latent_cache(spec, norm).write(kv, step, cache)
    latent, _, _ = unpacked(cache)
    # float8 has three bits behind the first: half of 1/8.
    torch.testing.assert_close(latent, norm(kv[:, :512]), atol=1e-3, rtol=1 / 16)
