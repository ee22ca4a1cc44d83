from pathlib import Path

import pytest
import torch

from services.worker.capacity import (
    MemoryUse,
    check_block_count,
    count_blocks,
    device_budget,
    free_host_bytes,
    host_budget,
    measure_device,
    min_blocks,
)
from shared.errors import ConfigError


def test_the_budget_is_divided_into_blocks() -> None:
    assert count_blocks(1000, 10, 128) == 100
    assert count_blocks(1009, 10, 128) == 100


def test_one_longest_sequence_and_the_scratch_block_must_fit() -> None:
    assert min_blocks(256) == 3
    assert min_blocks(257) == 4
    assert count_blocks(30, 10, 256) == 3
    with pytest.raises(ConfigError) as caught:
        count_blocks(39, 10, 385)
    text = str(caught.value)
    assert "39 bytes holds 3 blocks" in text
    assert "--max-model-len 385 needs 5" in text
    assert "--kv-cache-memory-bytes to 50" in text
    assert "--max-model-len to 256" in text


def test_no_length_is_named_where_none_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"holds 1 block, and .* to 30$"):
        count_blocks(19, 10, 256)


def test_no_budget_at_all_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="holds 0 blocks"):
        count_blocks(-5, 10, 100)


def test_a_count_by_hand_must_suffice() -> None:
    assert check_block_count(3, 256) == 3
    with pytest.raises(ConfigError, match="--num-kv-blocks 2"):
        check_block_count(2, 256)


def test_a_device_gives_its_share_less_what_is_held() -> None:
    assert device_budget(MemoryUse(total=1000, peak=300, others=50), 0.9) == 550


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        file = root / {"meminfo": "proc/meminfo"}.get(name, f"sys/fs/cgroup/memory.{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_free_memory_is_the_tighter_of_system_and_container(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    write(tmp_path, meminfo="MemTotal:  9 kB\nMemAvailable:     1000 kB\n")
    assert free_host_bytes(tmp_path) == 1_024_000
    write(tmp_path, max="max\n", current="5\n")
    assert free_host_bytes(tmp_path) == 1_024_000
    write(tmp_path, max="700000\n", current="100000\n")
    assert free_host_bytes(tmp_path) == 600_000


def test_a_host_budget_beyond_the_free_memory_is_refused_with_both_numbers() -> None:
    assert host_budget(None, None) == 512 << 20
    assert host_budget(700, 700) == 700
    with pytest.raises(ConfigError, match=r"701 is above the 700 bytes"):
        host_budget(701, 700)


def test_a_device_is_measured_around_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    answers = {
        "reset_peak_memory_stats": None,
        "synchronize": None,
        "get_memory_info": (600, 1000),
        "memory_reserved": 250,
        "max_memory_reserved": 300,
        "empty_cache": None,
    }
    for name, answer in answers.items():

        def answered(*_: object, name: str = name, answer: object = answer) -> object:
            calls.append(name)
            return answer

        monkeypatch.setattr(torch.accelerator, name, answered, raising=False)
    use = measure_device(torch.device("meta"), lambda: calls.append("step"))
    assert use == MemoryUse(total=1000, peak=300, others=150)
    assert calls[:3] == ["reset_peak_memory_stats", "step", "synchronize"]
