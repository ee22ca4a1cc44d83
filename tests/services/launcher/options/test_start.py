import json
import os
from pathlib import Path

import pytest

from services.launcher.options.start import read_start
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GLM_MESH_")]:
        monkeypatch.delenv(name)


def test_what_works_becomes_settings_and_words_of_services() -> None:
    start = read_start(
        ["--port", "1", "--seed", "7", "--additional-config", '{"enable_sparse_li_c8": true}'], {}
    )
    assert start.settings.port == 1
    assert start.service_flags == {
        "worker": ("--enable-sparse-li-c8",),
        "frontend": ("--seed=7",),
    }
    assert not start.lines


def test_what_is_switched_off_reaches_no_service(tmp_path: Path) -> None:
    dense = {"num_attention_heads": 4, "n_routed_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    start = read_start([str(tmp_path), "--additional-config.enable_sparse_li_c8", "true"], {})
    assert start.service_flags == {"worker": ("--no-enable-sparse-li-c8",)}
    assert len(start.lines) == 1


def test_everything_that_is_wrong_is_told_at_once_a_line_each() -> None:
    with pytest.raises(ConfigError) as caught:
        read_start(
            [
                *("--bogus", "--port", "70000", "-tp", "3", "-dcp", "2", "--block-size", "0"),
                *("--additional-config", '{"weight_nz_mode": 5}'),
            ],
            {"HCCL_BUFFSIZE": "many"},
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{len(lines) - 1} options are wrong or not served:"
    starts = [
        "unknown option --bogus",
        "--port '70000'",
        "--block-size 0:",
        "--additional-config: weight_nz_mode 5:",
        "HCCL_BUFFSIZE=many:",
        "--decode-context-parallel-size 2: not available",
    ]
    for start in starts:
        assert any(line.strip().startswith(start) for line in lines), start


def test_one_mistake_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--block-size x: ") as caught:
        read_start(["--block-size", "x"], {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_a_quantized_checkpoint_is_asserted_by_the_flag(
    tmp_path: Path, *, is_quantized: bool
) -> None:
    if is_quantized:
        (tmp_path / "quant_model_description.json").write_text("{}")
    argv = [str(tmp_path), "--quantization"]
    right, wrong = ("ascend", "none") if is_quantized else ("none", "ascend")
    assert not read_start([*argv, right], {}).service_flags
    with pytest.raises(ConfigError, match=f"--quantization {wrong} with --model"):
        read_start([*argv, wrong], {})


def test_values_of_the_settings_take_part_in_conflicts_wherever_they_come_from(
    tmp_path: Path,
) -> None:
    path = tmp_path / "up.toml"
    path.write_text("max_num_seqs = 64\n")
    with pytest.raises(ConfigError, match="--max-num-batched-tokens 8 with --max-num-seqs 64"):
        read_start(["--config", str(path), "--max-num-batched-tokens", "8"], {})


def test_the_layout_of_ranks_is_read_in_long_and_short_form() -> None:
    start = read_start(["-tp", "2", "-pp", "2", "-ep"], {"VLLM_PP_LAYER_PARTITION": "3,2"})
    layout = start.layout
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size) == (2, 2)
    assert layout.enable_expert_parallel
    assert layout.layer_partition == (3, 2)
    assert read_start(["--data-parallel-size", "2"], {}).layout.data_parallel_size == 2


def test_more_ranks_than_this_machine_runs_are_one_line_with_their_sizes() -> None:
    with pytest.raises(ConfigError, match="--data-parallel-size 4000: 4000 ranks are more"):
        read_start(["--data-parallel-size", "4000"], {})
    with pytest.raises(ConfigError, match="the 1 devices of ASCEND_RT_VISIBLE_DEVICES=7"):
        read_start(["--device", "npu", "-tp", "2"], {"ASCEND_RT_VISIBLE_DEVICES": "7"})


def test_stages_and_heads_that_the_model_has_not_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 6 with .*num_hidden_layers"):
        read_start(["-pp", "6"], {})
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 with .*num_attention_heads"):
        read_start(["-tp", "3"], {})


def test_schedulers_are_counted_where_workers_are() -> None:
    start = read_start(["--scheduler-count", "2", "--data-parallel-size", "2"], {})
    assert start.settings.scheduler_count == 2
    assert start.layout.num_processes == 4
    with pytest.raises(ConfigError, match=r"--scheduler-count 64 x .* 64 ranks are more than"):
        read_start(
            ["--scheduler-count", "64", "--device", "npu"], {"ASCEND_RT_VISIBLE_DEVICES": "0"}
        )
    with pytest.raises(ConfigError, match="--scheduler-count '0'"):
        read_start(["--scheduler-count", "0"], {})
