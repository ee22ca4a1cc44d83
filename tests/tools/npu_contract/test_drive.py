"""Driving a step notes every call with its place, and stands in for what is not there."""

import pytest

from services.worker import ops
from tools.npu_contract.cases import STEPS
from tools.npu_contract.drive import Run, build, drive
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


def test_tokens_that_are_cut_are_exchanged_by_the_model_itself() -> None:
    variant = Variant(model="two layers", place="DSA-CP8 FlashComm EP16")
    run = drive(build(variant), variant, STEPS["prefill"])
    num_tokens = sum(STEPS["prefill"].query_lens)
    assert run.outputs["hidden"].shape == (num_tokens, 6144)
    attention = [call for call in run.calls if call.operator == "npu_sparse_flash_attention"]
    # All heads of an eighth of the tokens, and the padding's sequence behind the others.
    assert {call.results[0].shape for call in attention} == {(-(-num_tokens // 8), 64, 512)}
    lengths = attention[0].arguments["actual_seq_lengths_query"]
    assert len(lengths) == len(STEPS["prefill"].query_lens) + 1


def test_a_first_stage_has_no_logits() -> None:
    variant = Variant(model="glm-5.2", place="first of PP2")
    run = drive(build(variant), variant, STEPS["decode"])
    assert run.outputs.keys() == {"hidden"}
