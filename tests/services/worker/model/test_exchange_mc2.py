"""The exchange by fused operators."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from services.worker.model.cache_format import CacheFormat, Generation
from services.worker.model.spec import ModelSpec
from services.worker.parallel.moe_method import MoeMethod
from tests.services.worker.model.exchanges import check_layer, hand_over, run_layer


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("tp2,ep", [5]),
        ("tp2,ep", [1]),
        ("dp2,ep", [7, 1]),
        ("dp4,ep", [1, 4, 2, 3]),
        ("dp2,tp2,ep", [3, 6]),
    ],
)
def test_sums_come_back_whatever_the_replicas_have(
    spec: ModelSpec, layout: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over(monkeypatch, layout)
    check_layer(run_layer(spec, layout, MoeMethod.MC2, counts))


@pytest.mark.parametrize(
    ("layout", "counts"),
    [("tp2,ep", [5]), ("tp4,ep", [1]), ("dp2,tp2,ep", [3, 6]), ("dp2,tp2,ep", [1, 8])],
)
def test_shares_of_a_cut_stream_get_their_own_sums(
    spec: ModelSpec, layout: str, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over(monkeypatch, layout)
    check_layer(run_layer(spec, layout, MoeMethod.MC2, counts, is_flashcomm=True))


@pytest.mark.parametrize(("generation", "sends_weights"), [("a2", True), ("a3", False)])
def test_an_a2_is_given_the_weights_on_the_way(
    spec: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    generation: Generation,
    sends_weights: bool,
) -> None:
    hand_over(monkeypatch, "dp2,ep")
    given = []
    dispatch = torch.ops.npu.npu_moe_distribute_dispatch_v2
    combine = torch.ops.npu.npu_moe_distribute_combine_v2

    def note_dispatch(**named: Any) -> Any:
        given.append(named["expert_scales"] is not None)
        return dispatch(**named)

    def note_combine(**named: Any) -> Any:
        given.append(named["expand_scales"] is not None)
        return combine(**named)

    monkeypatch.setattr(torch.ops.npu, "npu_moe_distribute_dispatch_v2", note_dispatch)
    monkeypatch.setattr(torch.ops.npu, "npu_moe_distribute_combine_v2", note_combine)
    own = replace(spec, cache=CacheFormat(generation=generation))
    check_layer(run_layer(own, "dp2,ep", MoeMethod.MC2, [3, 2]))
    assert set(given) == {sends_weights}
    assert len(given) == 4
