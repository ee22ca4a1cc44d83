"""The model relies on nothing that a device leaves open: logits do not depend on it."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker import ops
from services.worker.model.cache_format import CacheFormat
from services.worker.model.config import ModelConfig
from services.worker.model.decoder import Decoder
from services.worker.model.placement import Placement
from services.worker.model.spec import ModelSpec
from services.worker.ops.device_rules import DeviceGuard
from services.worker.parallel.groups import Groups
from services.worker.quant.scheme import Scheme
from services.worker.sizing.recipe import SchemeName, describe
from tests.services.worker.model.conftest import Driver
from tests.services.worker.model.hostile import Hostile, installed, random_weight
from tests.services.worker.parallel.thread_groups import make_groups, run_together

Weights = Literal["float", "w8a8", "w8a8 dynamic", "w4a8"]
RECIPES: dict[Weights, SchemeName] = {
    "float": "bf16",
    "w8a8": "w8a8",
    "w8a8 dynamic": "w8a8",
    "w4a8": "w4a8c8",
}
CACHES = {
    "plain": CacheFormat(),
    "c8": CacheFormat(sparse_sfa_c8=True, sparse_li_c8=True),
}
PLACES = {"alone": Placement(), "one of three": Placement(ep_size=3, ep_rank=1)}
# Widths that the device's products take.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "num_nextn_predict_layers": 1,
}


def make_spec(tiny_values: dict[str, Any], weights: Weights, caches: str, place: str) -> ModelSpec:
    config = ModelConfig.from_dict(tiny_values | SIZES)
    quantization = describe(config, RECIPES[weights])
    if weights == "w8a8 dynamic":
        dynamic = {Scheme.W8A8.value: Scheme.W8A8_DYNAMIC.value}
        types = {name: dynamic.get(kind, kind) for name, kind in quantization.types.items()}
        quantization = replace(quantization, types=types)
    return ModelSpec(
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        placement=PLACES[place],
        quantization=quantization,
        cache=CACHES[caches],
        has_mtp=True,
        weight_nz_mode=int(caches == "plain"),  # both layouts are among the cases
    )


def compute(spec: ModelSpec, padding: tuple[int, int, int] = (5, 3, 2)) -> list[Tensor]:
    """Logits of two sequences past the selection's width, and of drafts; with rows of padding."""
    generator = torch.Generator().manual_seed(3)
    decoder = Decoder.build(spec)
    for slot in decoder.slots():
        if slot.window is None or 0 not in slot.kept_shape:
            slot.store(random_weight(slot, generator))
    decoder.finish_loading()
    driver = Driver(decoder, 2, 256)
    tokens = torch.randint(0, 97, (150,), generator=generator).tolist()
    found = driver.step([(0, tokens[:90])])
    found += driver.step([(0, tokens[90:91]), (1, tokens[:40])], padding=padding[0])
    found += driver.step([(1, tokens[40:140]), (0, tokens[91:92])], padding=padding[1])
    return [*found, *draft(driver, tokens, padding[2])]


def draft(driver: Driver, tokens: list[int], padding: int) -> list[Tensor]:
    decoder = driver.decoder
    chunk = driver.metadata([(0, tokens[92:100])], padding)
    ids = torch.tensor([*tokens[92:100], *[0] * padding])
    hidden = decoder.forward(ids, chunk, driver.caches)
    drafted = decoder.draft(ids.roll(-1), hidden, chunk, driver.caches)
    return [decoder.compute_draft_logits(drafted)[:8]]


CASES = [(weights, caches, "alone") for weights in RECIPES for caches in CACHES]
CASES += [(weights, "plain", "one of three") for weights in RECIPES]


@pytest.mark.parametrize(("weights", "caches", "place"), CASES)
def test_what_nobody_asked_for_reaches_no_logit(
    tiny_values: dict[str, Any], weights: Weights, caches: str, place: str
) -> None:
    spec = make_spec(tiny_values, weights, caches, place)
    friendly = compute(spec)
    assert all(bool(logits.isfinite().all()) for logits in friendly)
    with installed(Hostile(is_shuffling=False).kernels()), DeviceGuard():
        hostile = compute(spec)
    for ours, theirs in zip(hostile, friendly, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("ep_size", [1, 4])
@pytest.mark.parametrize(("weights", "caches"), [("float", "plain"), ("w8a8", "c8")])
def test_padding_of_ranks_that_cut_tokens_reaches_no_logit(
    tiny_values: dict[str, Any], weights: Weights, caches: str, ep_size: int
) -> None:
    """Of 90, 41, 101 and 8 tokens four ranks have as many with padding behind them.

    A step's own padding, which nobody tells from tokens, goes to experts like those: what a device
    leaves in its rows would be met there (CANN says zeros).
    """
    # The compiled kernels' threads serve one caller at a time.
    ops.set_num_threads(1)
    spec = make_spec(tiny_values, weights, caches, "alone")

    def run() -> list[list[Tensor]]:
        members = {name: make_groups(name, 4) for name in ("tp", "ep")}

        def work(rank: int) -> list[Tensor]:
            placement = Placement(
                tp_size=4,
                tp_rank=rank,
                ep_size=ep_size,
                ep_rank=rank if ep_size > 1 else 0,
                is_dsa_cp=True,
                is_flashcomm=True,
            )
            groups = Groups(**{name: found[rank] for name, found in members.items()})
            padding = (0, 0, 0) if ep_size > 1 else (5, 3, 2)
            return compute(replace(spec, placement=placement, groups=groups), padding)

        return run_together(work, 4)

    friendly = run()
    with installed(Hostile(is_shuffling=False).kernels()):
        hostile = run()
    for ours, theirs in zip(hostile, friendly, strict=True):
        for found, due in zip(ours, theirs, strict=True):
            assert bool(due.isfinite().all())
            assert torch.equal(found, due)


@pytest.mark.parametrize("caches", CACHES)
@pytest.mark.parametrize("weights", RECIPES)
def test_the_order_of_positions_moves_logits_by_rounding_alone(
    tiny_values: dict[str, Any], weights: Weights, caches: str
) -> None:
    spec = make_spec(tiny_values, weights, caches, "alone")
    friendly = compute(spec)
    with installed(Hostile(is_shuffling=True).kernels()):
        hostile = compute(spec)
    for ours, theirs in zip(hostile, friendly, strict=True):
        error = (ours - theirs).abs()
        if (weights, caches) == ("float", "plain"):
            # Another order of the same float32 sums, of unit size.
            assert error.max() < 1e-4
        else:
            # A last bit before a rounding to eight bits is a step of 1/127 after it, which may move
            # a selection too: most logits stay, and none that read the order would.
            assert error.median() < 0.1


class ByKey(TorchDispatchMode):
    """Calls kernels as the recording of steps does."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace != "npu":
            return func(*args, **(kwargs or {}))
        with self:
            return func._op_dk(torch._C.DispatchKey.CPU, *args, **(kwargs or {}))


def test_hostile_kernels_leave_nothing_behind() -> None:
    def are_all_numbers(*, is_recorded: bool) -> bool:
        with torch.inference_mode(), ByKey() if is_recorded else nullcontext():
            unused = torch.ops.npu.npu_rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)[1]
        return bool(unused.isfinite().all())

    for is_recorded in (True, False):
        with installed(Hostile(is_shuffling=False).kernels()):
            assert not are_all_numbers(is_recorded=is_recorded)
        assert are_all_numbers(is_recorded=is_recorded)
