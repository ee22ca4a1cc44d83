"""What `glm-mesh quantize` does, from its settings to the finished checkpoint."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from services.worker import ops
from services.worker.loading.reader import CheckpointReader
from services.worker.model.config import ModelConfig
from services.worker.model.spec import ModelSpec
from services.worker.quant.calibrator import MAX_STEP_TOKENS
from services.worker.quant.convert import Conversion, Job, check_space
from services.worker.quant.display import show_outcome, shown_conversion
from services.worker.quant.prompts import DEFAULT_FILE, read_prompts
from services.worker.quant.recipe import RECIPES, Recipe, default_whole_layers
from services.worker.quant.scheme import DESCRIPTION_FILE
from services.worker.quant.settings import QuantizeSettings, read_layers
from services.worker.quant.writer import CheckpointWriter, check_target
from shared.errors import ConfigError
from shared.log import get_logger

_log = get_logger(__name__)

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Type to calibrate in, by the checkpoint's own. (Of float16 models ModelSlim stores scales in
another form, and GLM is none.)"""

# Weights in any form, and what is written anew. Everything else of a checkpoint goes along.
_LEFT_OUT: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx"})
_WRITTEN: Final = frozenset({"config.json", DEFAULT_FILE})
# Fewer say little of an outlier that comes once in a page.
_FEW_TOKENS: Final = 1024
_INDEX_END: Final = ".index.json"


def run(settings: QuantizeSettings, console: Console) -> None:
    """Quantize and print what came of it.

    Raises:
        ConfigError: A setting does not fit the checkpoint or the machine.
        CheckpointError: The checkpoint cannot be used.
    """
    started = time.monotonic()
    source, target = settings.src, settings.dst
    check_target(target, is_overwrite=settings.overwrite)
    config_values = _read_config(source)
    config = _parse_config(source, config_values)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    ops.set_num_threads(num_threads)
    torch.set_num_threads(1)  # rounding has threads of its own, one for each matrix
    ops.register()
    if config.dtype not in _DTYPES:
        raise ConfigError(
            f"{source / 'config.json'}: dtype is {config.dtype!r}, must be one of "
            f"{', '.join(_DTYPES)}"
        )
    spec = ModelSpec(config=config, dtype=_DTYPES[config.dtype], device=torch.device("cpu"))
    recipe = RECIPES[settings.scheme]
    job = Job(
        spec=spec,
        recipe=recipe,
        prompts=_read_prompts(settings, config, recipe),
        whole_key_layers=_whole_key_layers(settings, config),
        num_threads=num_threads,
    )
    with CheckpointReader(source) as reader:
        conversion = Conversion(reader, job)
        check_space(target.parent, conversion.target_bytes())
        writer = CheckpointWriter(
            target, max_shard_bytes=settings.max_shard_bytes, is_overwrite=settings.overwrite
        )
        with writer, shown_conversion(console, config.num_hidden_layers) as report:
            _copy_files(source, writer.folder)
            outcome = conversion.run(writer, report)
            config_values.pop("quantization_config", None)
            writer.commit(config_values, conversion.description_entries())
    show_outcome(console, outcome, time.monotonic() - started)


def _read_config(source: Path) -> dict[str, Any]:
    """config.json of a float checkpoint."""
    if not source.is_dir():
        raise ConfigError(f"SRC {source}: no such directory")
    if (source / DESCRIPTION_FILE).exists():
        raise ConfigError(f"SRC {source}: is quantized already: it has {DESCRIPTION_FILE}")
    file = source / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold one JSON object")
    if values.get("quantization_config"):
        raise ConfigError(f"SRC {source}: is quantized already: {file} has quantization_config")
    return values


def _parse_config(source: Path, values: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"SRC {source}: {error}") from error


def _read_prompts(
    settings: QuantizeSettings, config: ModelConfig, recipe: Recipe
) -> list[list[int]]:
    """Prompts to calibrate with; none where there is no file and the scheme can do without."""
    file = settings.calibration
    if file is None and (settings.src / DEFAULT_FILE).exists():
        file = settings.src / DEFAULT_FILE
    if not recipe.uses_calibration or (file is None and not recipe.needs_calibration):
        _log.warning("no calibration prompts: all inputs of a weight count alike")
        return []
    if file is None:
        raise ConfigError(
            f"--scheme {settings.scheme}: needs --calibration FILE: {settings.src} has no "
            f"{DEFAULT_FILE}"
        )
    prompts = read_prompts(
        file,
        settings.src,
        vocab_size=config.vocab_size,
        max_tokens=settings.calibration_tokens,
        max_length=min(MAX_STEP_TOKENS, config.max_position_embeddings),
    )
    num_tokens = sum(map(len, prompts))
    if num_tokens < _FEW_TOKENS:
        _log.warning(
            "few calibration tokens: ranges of activations are guesses",
            extra={"num_tokens": num_tokens, "wanted": _FEW_TOKENS},
        )
    _log.info("calibration", extra={"num_prompts": len(prompts), "num_tokens": num_tokens})
    return prompts


def _whole_key_layers(settings: QuantizeSettings, config: ModelConfig) -> frozenset[int]:
    layers = read_layers(settings.c8_skip_layers)
    if layers is None:
        return default_whole_layers(config)
    if not RECIPES[settings.scheme].has_c8:
        raise ConfigError(f"--c8-skip-layers: --scheme {settings.scheme} has no 8-bit indexer keys")
    num_layers = config.num_hidden_layers + config.num_nextn_predict_layers
    last = max(layers, default=0)
    if last >= num_layers:
        raise ConfigError(f"--c8-skip-layers: layer {last}: the model has {num_layers} layers")
    return layers


def _copy_files(source: Path, folder: Path) -> None:
    """Tokenizer, template, defaults of sampling, licence: what lies beside the weights."""
    for file in sorted(source.iterdir()):
        is_weight = file.suffix in _LEFT_OUT or file.name.endswith(_INDEX_END)
        if not (file.is_file() and not is_weight) or file.name in _WRITTEN:
            continue
        if not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)
