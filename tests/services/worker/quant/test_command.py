"""`glm-mesh quantize` from its flags to a checkpoint that loads."""

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from services.worker.loading.load import load_model
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.quant.__main__ import EXIT_USAGE, main
from services.worker.quant.command import run
from services.worker.quant.scheme import DESCRIPTION_FILE, QuantDescription
from services.worker.quant.settings import QuantizeSettings
from shared.config import parse
from shared.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, source: Path, prompts: list[list[int]]) -> Path:
    """A checkpoint with what lies around it, and prompts."""
    folder = tmp_path / "in"
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    (folder / "config.json").write_text(json.dumps(values))
    for name in (
        "generation_config.json",
        "LICENSE",
        ".hidden",
        "notes.bak",
    ):
        (folder / name).write_text(name)
    (folder / "calibration.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return folder


def quantize(source: Path, target: Path, *flags: str) -> str:
    out = io.StringIO()
    words = [str(source), str(target), "--num-threads", "1", *flags]
    run(parse(QuantizeSettings, words), Console(file=out, width=120))
    return out.getvalue()


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8c8", "w4a8c8"])
def test_the_result_loads(folder: Path, tmp_path: Path, scheme: str) -> None:
    text = quantize(folder, tmp_path / "out", "--scheme", scheme)
    assert "W8A8_DYNAMIC" in text
    spec = ModelSpec(
        config=ModelConfig.from_dir(tmp_path / "out"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        quantization=QuantDescription.from_dir(tmp_path / "out"),
    )
    load_model(tmp_path / "out", spec)


def test_what_lies_beside_the_weights_goes_along(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "out", "--scheme", "w4a8c8")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "LICENSE",
        "notes.bak",
        DESCRIPTION_FILE,
        "quant_model_weights-00001-of-00001.safetensors",
        "quant_model_weights.safetensors.index.json",
    }
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "out")
    )
    assert before.keys() - after.keys() == {"quantization_config"}
    assert all(before[name] == after[name] for name in after)


def test_static_scales_need_prompts(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "elsewhere.jsonl"
    (folder / "calibration.jsonl").rename(prompts)
    with pytest.raises(ConfigError, match=r"--scheme w8a8: needs --calibration FILE"):
        quantize(folder, tmp_path / "out", "--scheme", "w8a8")
    quantize(folder, tmp_path / "out", "--scheme", "w8a8", "--calibration", str(prompts))
    quantize(folder, tmp_path / "int4", "--scheme", "w4a8c8")


def test_the_layers_that_keep_their_keys_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "out", "--scheme", "w8a8c8", "--c8-skip-layers", "0-1")
    values = json.loads((tmp_path / "out" / DESCRIPTION_FILE).read_text())
    key = "model.layers.{}.self_attn.indexer.quant_type"
    assert [values[key.format(layer)] for layer in (0, 2)] == ["FLOAT", "INT8_DYNAMIC"]


@pytest.mark.parametrize(("count", "is_warned"), [(1, True), (1024, False)])
def test_a_handful_of_calibration_tokens_is_warned_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, is_warned: bool
) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps([1 + i % 7 for i in range(min(64, count))])] * -(-count // 64)
    file.write_text("\n".join(lines))
    quantize(folder, tmp_path / "out", "--scheme", "w8a8", "--calibration", str(file))
    assert ("few calibration tokens" in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scheme", "w8a8", "--c8-skip-layers", "1"), "--scheme w8a8 has no 8-bit indexer keys"),
        (("--scheme", "w8a8c8", "--c8-skip-layers", "4"), "layer 4: the model has 4 layers"),
        (("--scheme", "w8a8", "--calibration", "/absent"), "--calibration /absent: cannot be read"),
    ],
)
def test_flags_that_do_not_fit_are_named(
    folder: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(folder, tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_not_quantized_again(folder: Path, tmp_path: Path) -> None:
    quantize(folder, tmp_path / "out", "--scheme", "w4a8c8")
    with pytest.raises(ConfigError, match=r"out: is quantized already: it has quant_model"):
        quantize(tmp_path / "out", tmp_path / "again", "--scheme", "w4a8c8")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"is quantized already: .* has quantization_config"):
        quantize(folder, tmp_path / "again", "--scheme", "w4a8c8")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(folder: Path, tmp_path: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"in/config\.json"):
        quantize(folder, tmp_path / "out", "--scheme", "w4a8c8")


def test_a_type_that_is_not_quantized_is_named(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "config.json").read_text()) | {"dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="dtype is 'float16', must be one of bfloat16"):
        quantize(folder, tmp_path / "out", "--scheme", "w4a8c8")


def test_mistakes_end_with_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(tmp_path / "absent"), str(tmp_path / "out"), "--scheme", "w8a8"])
    assert code == EXIT_USAGE
    assert capsys.readouterr().err == f"quantize: SRC {tmp_path / 'absent'}: no such directory\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_process_that_is_stopped_leaves_nothing(
    folder: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    target = tmp_path / "out"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps([token % 97] * 400) for token in range(400)))
    words = [sys.executable, "-P", "-m", "services.worker.quant", str(folder), str(target)]
    flags = ["--scheme", "w8a8", "--calibration", str(prompts), "--calibration-tokens", "160000"]
    with subprocess.Popen([*words, *flags], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not list(tmp_path.glob(".out.partial-*")):
            assert process.poll() is None, process.stderr.read()
        process.send_signal(number)
        assert process.wait(60) == code, process.stderr.read()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "prompts.jsonl"]
