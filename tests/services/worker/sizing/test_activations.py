"""The formulas of a step against the memory that the model's own code asks for.

The decoder runs a step on meta tensors while every storage it makes is counted until it is gone.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.worker import ops
from services.worker.dummy import dummy_step
from services.worker.kv_cache import allocate
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.layer import Dense
from services.worker.parallel.topology import Rank
from services.worker.sizing.activations import (
    gathered_latent_bytes,
    logits_bytes,
    stage_bytes,
    step_bytes,
    topk_bytes,
)
from services.worker.sizing.deployment import Deployment
from services.worker.sizing.plan import rank_spec
from tests.services.worker.sizing.conftest import MakeDeployment
from tools.npu_contract.ranks import make_groups

TOKENS = 2048
FIRST = Rank(dp_rank=0, pp_rank=0, tp_rank=0)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made inside, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in self._live:
                storage = leaf.untyped_storage()
                self._live[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, id(storage))
        self.peak = max(self.peak, sum(self._live.values()))
        return made


def cut_model(config: ModelConfig, *, is_dense: bool) -> ModelConfig:
    """A few layers: with experts, or all dense so that attention is the fullest moment."""
    count = 3 if is_dense else 6
    return replace(
        config,
        num_hidden_layers=count,
        indexer_types=config.indexer_types[:count],
        mlp_layer_types=config.mlp_layer_types[:count],
        max_position_embeddings=8192,
    )


def measured_peak(deployment: Deployment) -> int:
    ops.register()
    spec = rank_spec(deployment, FIRST)
    spec = replace(spec, groups=make_groups(spec.placement))
    decoder = Decoder.build(spec)
    for layer in decoder.layers:
        if not isinstance(layer.mlp, Dense):
            layer.mlp.experts.finish_loading()
    caches = allocate(spec, 2)
    token_ids, step = dummy_step(1, TOKENS, torch.device("meta"))
    live = LiveBytes()
    with live:
        decoder.forward(token_ids, step, caches)
    return live.peak


@pytest.mark.parametrize("scheme", ["bf16", "w8a8c8", "w4a8c8"])
@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize(
    ("topology", "has_c8", "cuts"),
    [
        ("tp1", False, ()),
        ("tp1", True, ()),
        ("tp8", True, ()),
        ("tp8", True, ("is_dsa_cp",)),
        ("tp8", False, ("is_flashcomm",)),
        ("tp8", True, ("is_dsa_cp", "is_flashcomm")),
        ("tp8,ep", True, ("is_dsa_cp", "is_flashcomm")),
    ],
)
def test_a_step_takes_what_the_formulas_say(
    glm: ModelConfig,
    make_deployment: MakeDeployment,
    topology: str,
    scheme: str,
    is_dense: bool,
    has_c8: bool,
    cuts: tuple[str, ...],
) -> None:
    config = cut_model(glm, is_dense=is_dense)
    switches = dict.fromkeys(cuts, True)
    deployment = make_deployment(
        topology, scheme, "a2", config=config, max_model_len=4096, sfa=has_c8, li=has_c8, **switches
    )
    planned = step_bytes(deployment, TOKENS).peak + topk_bytes(deployment, TOKENS)
    measured = measured_peak(deployment)
    # Never less; the slack is for what a step does not hold all at once: indices of two layers,
    # the indexer's queries beside attention's.
    assert measured <= planned <= 1.25 * measured


def test_logits_and_the_copies_of_drawing_are_counted(make_deployment: MakeDeployment) -> None:
    alone = make_deployment("tp1", max_num_seqs=48)
    # bfloat16, float32, and 34 bytes of copies for each logit.
    assert logits_bytes(alone) == 48 * 154_880 * (2 + 4 + 34)
    cut = make_deployment("tp8", max_num_seqs=48)
    assert logits_bytes(cut) - logits_bytes(alone) == 48 * 154_880 * 2


def test_tokens_divided_inside_attention_take_less_of_it(make_deployment: MakeDeployment) -> None:
    by_heads = make_deployment("tp8", "bf16")
    by_tokens = make_deployment("tp8", "bf16", is_dsa_cp=True)
    assert topk_bytes(by_tokens, 8192) * 8 == topk_bytes(by_heads, 8192)
    attention = step_bytes(by_tokens, 8192).attention
    # All heads of an eighth of the tokens, but latents and indexer queries of an eighth only.
    assert attention < step_bytes(by_heads, 8192).attention


def test_int8_rows_take_less_than_float_ones(make_deployment: MakeDeployment) -> None:
    peaks = [
        step_bytes(make_deployment("dp2,tp8,ep", scheme, "a2"), 8192).experts
        for scheme in ("w8a8", "w4a8c8", "bf16")
    ]
    assert peaks == sorted(peaks)


def test_gathering_replicas_multiplies_rows(make_deployment: MakeDeployment) -> None:
    two, four = (
        step_bytes(make_deployment(f"dp{replicas},tp8,ep", hardware="a2"), 8192).experts
        for replicas in (2, 4)
    )
    assert four == 2 * two
    exchanged = step_bytes(make_deployment("dp4,tp8,ep", hardware="a3"), 8192).experts
    assert exchanged < four


def test_only_divided_caches_and_stages_have_buffers_for_them(
    make_deployment: MakeDeployment,
) -> None:
    plain = make_deployment("tp8")
    assert gathered_latent_bytes(plain, 1152) == 0
    assert stage_bytes(plain, 8192) == 0
    divided = make_deployment("tp8,dcp8", max_model_len=1_024_000)
    assert gathered_latent_bytes(divided, 656) == 1_024_000 * 656
    assert stage_bytes(make_deployment("pp2,tp8"), 8192) == 2 * 8192 * 6144 * 2
