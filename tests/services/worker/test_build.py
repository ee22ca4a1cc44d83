import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.worker.build import choose_max_model_len, executor_builder, replay_capacity
from services.worker.replay import ReplayExecutor
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError


def settings(**changes: Any) -> WorkerSettings:
    return WorkerSettings(address="unix:/tmp/w.sock", worker_mode="replay", **changes)


def test_a_replay_worker_needs_no_checkpoint() -> None:
    executor = executor_builder(settings(max_num_seqs=3), lambda: False)()
    assert isinstance(executor, ReplayExecutor)
    assert executor.capacity.num_rows == 6
    assert executor.capacity.is_replay


def test_a_replay_worker_takes_its_sizes_from_a_checkpoint(
    tmp_path: Path, tiny_values: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_values))
    capacity = replay_capacity(settings(model=tmp_path))
    assert capacity.vocab_size == 97
    assert capacity.max_model_len == 512


def test_blocks_of_a_replay_worker_hold_one_longest_sequence() -> None:
    assert replay_capacity(settings(max_model_len=1280, num_kv_blocks=11)).num_blocks == 11
    with pytest.raises(ConfigError, match="needs 11"):
        replay_capacity(settings(max_model_len=1280, num_kv_blocks=10))


def test_a_context_beyond_the_model_is_refused_with_both_numbers() -> None:
    assert choose_max_model_len(None, 100) == 100
    assert choose_max_model_len(50, 100) == 50
    with pytest.raises(ConfigError, match=r"101 is above the model's own 100"):
        choose_max_model_len(101, 100)


def test_a_replay_worker_imports_no_torch() -> None:
    code = (
        "import sys; import services.worker.__main__; from services.worker.build import *;"
        "executor_builder(WorkerSettings(address='unix:/tmp/w', worker_mode='replay'), bool)();"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_replay_worker_tells_the_ids_that_a_models_worker_would() -> None:
    nano = Path(__file__).resolve().parents[3] / "models" / "glm-nano"
    vocab = Tokenizer.from_file(str(nano / "tokenizer.json")).get_vocab_size()
    assert replay_capacity(settings(model=nano)).vocab_size == vocab
