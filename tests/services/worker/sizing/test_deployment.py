from typing import Any

import pytest

from services.worker.model.config import ModelConfig
from shared.errors import ConfigError
from tests.services.worker.sizing.conftest import MakeDeployment


@pytest.mark.parametrize(
    ("topology", "hardware", "fields", "said"),
    [
        ("tp8", "a3", {"max_model_len": 1048577}, "--max-model-len 1048577 is above"),
        (
            "tp8",
            "a3",
            {"max_num_seqs": 64, "max_num_batched_tokens": 32},
            "--max-num-batched-tokens 32 must be at least --max-num-seqs 64",
        ),
        ("tp8", "a3", {"num_full_seqs": 257}, "--at-least 257 is above --max-num-seqs 256"),
        ("tp2", "cpu", {"kv_cache_bytes": 1}, "--topology tp2 and --hardware cpu"),
    ],
)
def test_limits_that_exclude_each_other_are_refused_by_both_names(
    make_deployment: MakeDeployment,
    topology: str,
    hardware: str,
    fields: dict[str, Any],
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said):
        make_deployment(topology, "bf16", hardware, **fields)


def test_drafts_need_an_mtp_layer(make_deployment: MakeDeployment, glm: ModelConfig) -> None:
    from dataclasses import replace

    bare = replace(glm, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="--num-speculative-tokens 3: the model has no MTP layer"):
        make_deployment("tp8", num_speculative_tokens=3, config=bare)


def test_a_decode_step_has_a_token_and_the_drafts_of_every_sequence(
    make_deployment: MakeDeployment,
) -> None:
    deployment = make_deployment(
        "tp8", max_num_seqs=32, num_speculative_tokens=5, max_num_batched_tokens=8192
    )
    assert deployment.decode_tokens == 192
    few = make_deployment(
        "tp8", max_num_seqs=32, num_speculative_tokens=5, max_num_batched_tokens=100
    )
    assert few.decode_tokens == 100


def test_captured_steps_hold_whole_rows_of_drafts(make_deployment: MakeDeployment) -> None:
    deployment = make_deployment("tp8", max_num_seqs=12, num_speculative_tokens=3)
    sizes = deployment.captured()
    assert sizes[-1] == 48
    assert all(size % 4 == 0 for size in sizes)
    # Ranks that divide tokens among them need a multiple of their number, too.
    for cut in ("is_dsa_cp", "is_flashcomm"):
        fields = {"max_num_seqs": 48, "num_speculative_tokens": 2, cut: True}
        assert make_deployment("tp16", **fields).captured() == (48, 96, 144)
    # Stages hand on what is of another size in each step.
    assert make_deployment("pp2,tp8").captured() == ()


def test_captured_steps_are_those_asked_for(make_deployment: MakeDeployment) -> None:
    asked = make_deployment("tp16", num_speculative_tokens=3, capture_sizes=(4, 16, 128))
    assert asked.captured() == (4, 16, 128)
    assert make_deployment("tp16", capture_sizes=(4,), is_eager=True).captured() == ()
    with pytest.raises(ConfigError, match="of 4 none is left"):
        make_deployment("tp16", capture_sizes=(4,), is_dsa_cp=True).captured()


def test_steps_beyond_the_largest_captured_size_are_not_captured(
    make_deployment: MakeDeployment,
) -> None:
    many = make_deployment("tp8", max_num_seqs=2048, max_num_batched_tokens=8192)
    assert many.captured()[-1] == 512
