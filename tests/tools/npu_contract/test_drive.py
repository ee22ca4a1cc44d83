"""Driving a step notes every call with its place, and stands in for what is not there."""

import pytest
import torch

from services.worker import ops
from tools.npu_contract.cases import STEPS
from tools.npu_contract.drive import Exchange, Run, build, drive
from tools.npu_contract.variants import Variant


@pytest.fixture(autouse=True)
def operators() -> None:
    ops.register()


def test_calls_are_noted_with_their_place_arguments_and_results() -> None:
    variant = Variant(model="two layers")
    run = drive(build(variant), variant, STEPS["decode"])
    first = run.calls[0]
    assert first.operator == "npu_rms_norm"
    assert first.place[0] == "model.norm"
    assert first.arguments["epsilon"] == 2e-5
    assert first.results[0].shape == (4, 6144)
    assert run.outputs.keys() == {"hidden", "logits", "draft hidden", "draft logits"}
    assert "aten::mm" in run.others or "glm::linear" in run.others


def test_loading_is_noted_too() -> None:
    loading = Run()
    build(Variant(model="two layers", weights="w8a8"), loading)
    assert {call.operator for call in loading.calls} == {"npu_format_cast"}
    assert {call.place[0] for call in loading.calls} == {"model.linear_int8"}


def test_a_rank_gets_its_heads_of_all_tokens_and_the_sums_of_its_own() -> None:
    seen: list[torch.Size] = []

    class Product:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape)
            return x.new_empty(len(x), 5)

    result = Exchange(Product(), 4)(torch.empty(3, 32))  # type: ignore[arg-type]
    assert seen == [torch.Size([12, 8])]
    assert result.shape == (3, 5)


def test_a_first_stage_has_no_logits() -> None:
    variant = Variant(model="glm-5.2", place="first of PP2")
    run = drive(build(variant), variant, STEPS["decode"])
    assert run.outputs.keys() == {"hidden"}
