from typing import Any

import pytest

from services.worker.parallel.hccl import Mc2Window
from services.worker.parallel.moe_method import MAX_MC2_TOKENS, MoeMethod, MoeRules
from shared.errors import ConfigError


def make_rules(**changes: Any) -> MoeRules:
    values = {
        "hardware": "a3",
        "ep_size": 16,
        "tp_size": 8,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mc2_tokens": 64,
    }
    return MoeRules(**(values | changes))


# Hardware, expert ranks, tokens of the largest replica, and the method that upstream's table names.
TABLE = [
    ("a3", 1, 64, MoeMethod.ALLGATHER),
    ("a3", 16, 64, MoeMethod.MC2),
    ("a3", 16, 65, MoeMethod.ALLTOALL),
    ("a2", 16, 64, MoeMethod.MC2),
    ("a2", 16, 65, MoeMethod.ALLGATHER),
    ("a2", 8, 64, MoeMethod.ALLGATHER),
    ("a5", 16, 64, MoeMethod.MC2),
    ("a5", 16, 65, MoeMethod.ALLTOALL),
    ("a5", 8, 65, MoeMethod.ALLGATHER),
    ("cpu", 4, 64, MoeMethod.ALLGATHER),
]


@pytest.mark.parametrize(("hardware", "ranks", "tokens", "method"), TABLE)
def test_the_method_follows_generation_ranks_and_tokens(
    hardware: str, ranks: int, tokens: int, method: MoeMethod
) -> None:
    assert make_rules(hardware=hardware, ep_size=ranks).choose(tokens) is method


def test_a2_takes_at_most_24_experts_a_device() -> None:
    # 400 experts on 16 ranks are 25 each.
    assert make_rules(hardware="a2", num_experts=384).has_mc2
    assert not make_rules(hardware="a2", num_experts=400).has_mc2
    assert make_rules(hardware="a3", num_experts=400).has_mc2


def test_the_fused_operator_wants_as_many_experts_on_each_rank() -> None:
    rules = make_rules(num_experts=250)
    assert not rules.has_mc2
    assert rules.choose(1) is MoeMethod.ALLTOALL


@pytest.mark.parametrize(("hardware", "most"), MAX_MC2_TOKENS.items())
def test_a_rank_hands_over_no_more_than_the_operator_takes(hardware: str, most: int) -> None:
    assert make_rules(hardware=hardware, mc2_tokens=1 << 20).capacity == 8 * most
    # Seven tokens over eight ranks are one each.
    assert make_rules(hardware=hardware, mc2_tokens=7).capacity == 8


@pytest.mark.parametrize(
    ("mib", "capacity", "above"),
    # 6.46 MiB for each token of a rank, of which 64 tokens on 8 ranks have 8.
    [(52, 64, 65), (51, 56, 57), (7, 8, 9), (6, 0, 1)],
)
def test_steps_go_by_the_fused_operator_as_far_as_its_window_has_room(
    mib: int, capacity: int, above: int
) -> None:
    window = Mc2Window(
        is_a3=True,
        buffer_mib=mib,
        num_ranks=16,
        num_experts=16,
        num_choices=8,
        num_shared_experts=1,
        hidden_size=6144,
    )
    rules = make_rules(window=window)
    assert rules.capacity == capacity
    assert rules.has_mc2 == bool(capacity)
    assert rules.choose(above) is MoeMethod.ALLTOALL
    assert not capacity or rules.choose(capacity) is MoeMethod.MC2
    assert (rules.wanted_capacity, rules.needed_mib) == (64, 52)
    ladder = rules.ladder(8192)
    assert [most for most, _ in ladder] == ([capacity, 8192] if capacity else [8192])
    # Whatever the window, an operator that is forced is made of exchanges.
    forced = make_rules(hardware="cpu", window=None, forced=MoeMethod.MC2)
    assert forced.choose(100_000) is MoeMethod.MC2
    assert forced.needed_mib == 0


@pytest.mark.parametrize("method", MoeMethod)
def test_a_forced_method_holds_for_every_step(method: MoeMethod) -> None:
    rules = make_rules(hardware="cpu", ep_size=4, forced=method)
    assert {rules.choose(tokens) for tokens in (1, 64, 100_000)} == {method}
    # Without expert parallelism there is nothing to choose.
    assert make_rules(ep_size=1, forced=method).choose(1) is MoeMethod.ALLGATHER


def test_a_forced_operator_that_cannot_take_the_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method mc2: n_routed_experts=6 .* 4 ranks"):
        make_rules(num_experts=6, ep_size=4, forced=MoeMethod.MC2)


@pytest.mark.parametrize("hardware", ["a2", "a3", "a5", "cpu"])
@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_the_ladder_says_the_same_as_the_rules(hardware: str, ranks: int) -> None:
    rules = make_rules(hardware=hardware, ep_size=ranks)
    ladder = rules.ladder(8192)
    assert ladder[-1][0] == 8192
    for tokens in (1, 63, 64, 65, 8192):
        assert next(method for most, method in ladder if tokens <= most) is rules.choose(tokens)
