from typing import Any

import pytest

from services.worker.parallel.hccl import DEFAULT_HCCL_MIB, Mc2Window, read_buffer_mib
from shared.errors import ConfigError

MIB = 1 << 20


def make_window(**changes: Any) -> Mc2Window:
    values = {
        "is_a3": True,
        "buffer_mib": 200,
        "num_ranks": 16,
        "num_experts": 16,
        "num_choices": 8,
        "num_shared_experts": 1,
        "hidden_size": 6144,
    }
    return Mc2Window(**(values | changes))


def test_the_buffer_is_the_environments() -> None:
    assert read_buffer_mib({}) == read_buffer_mib({"HCCL_BUFFSIZE": ""}) == DEFAULT_HCCL_MIB
    assert read_buffer_mib({"HCCL_BUFFSIZE": "768"}) == 768
    for wrong in ("many", "0", "-1", "1.5"):
        with pytest.raises(ConfigError, match=f"HCCL_BUFFSIZE='{wrong}': must be a whole number"):
            read_buffer_mib({"HCCL_BUFFSIZE": wrong})


def test_an_a3_has_a_slot_for_every_token_of_every_rank_and_expert() -> None:
    # Rows of 12,288 bytes in slots of 12,800; 8 choices and the shared expert come back.
    each = 16 * 16 * 12_800 + 9 * 12_288
    assert make_window().needed_mib(12) == -(-2 * 12 * each // MIB) == 78


def test_others_have_one_for_every_token_and_choice() -> None:
    window = make_window(is_a3=False)
    assert window.needed_mib(12) == -(-2 * (12 * 16 * 8 * 12_288 + 2 * MIB) // MIB) == 40
    few = make_window(is_a3=False, num_experts=4)
    assert few.needed_mib(12) == -(-2 * (12 * 16 * 4 * 12_288 + 2 * MIB) // MIB)


@pytest.mark.parametrize("is_a3", [False, True])
@pytest.mark.parametrize("mib", [1, 4, 5, 77, 78, 200, 2560])
def test_a_window_holds_as_many_tokens_as_need_no_more_than_it(is_a3: bool, mib: int) -> None:
    window = make_window(is_a3=is_a3, buffer_mib=mib)
    most = window.most_tokens
    assert window.needed_mib(most + 1) > mib
    assert most == 0 or window.needed_mib(most) <= mib
