import pytest

from services.worker.capacity import (
    MemoryUse,
    check_block_count,
    count_blocks,
    device_budget,
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


def test_no_budget_at_all_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="holds 0 blocks"):
        count_blocks(-5, 10, 100)


def test_a_count_by_hand_must_suffice() -> None:
    assert check_block_count(3, 256) == 3
    with pytest.raises(ConfigError, match="--num-kv-blocks 2"):
        check_block_count(2, 256)


def test_a_device_gives_its_share_less_what_is_held() -> None:
    assert device_budget(MemoryUse(total=1000, peak=300, others=50), 0.9) == 550
