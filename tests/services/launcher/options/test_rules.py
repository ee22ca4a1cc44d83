from services.launcher.options.rules import Conflict, Idle, Outcome, Unbuilt
from tests.services.launcher.options.cases import deployment, extra


def conflict(outcome: Outcome, becomes: object = False) -> Conflict:
    return Conflict(
        key="k",
        names=("additional_config.enable_mlapo", "tensor_parallel_size"),
        holds=lambda asked: asked.flags.tensor_parallel_size > 1,
        outcome=outcome,
        text="they do not mix",
        source="here",
        becomes=becomes,
    )


def test_a_conflict_shows_all_its_names_with_their_values() -> None:
    asked = deployment("-tp 2 " + extra(enable_mlapo=True))
    assert conflict(Outcome.REFUSE).message(asked) == (
        "--additional-config enable_mlapo=true with --tensor-parallel-size 2: they do not mix"
    )
    assert conflict(Outcome.SWITCH_OFF).message(asked) == (
        "--additional-config enable_mlapo=true: switched off because of "
        "--tensor-parallel-size 2: they do not mix"
    )
    assert "now 128 because of" in conflict(Outcome.SWITCH_OFF, 128).message(asked)


def test_asking_for_the_default_asks_for_nothing() -> None:
    rule = Unbuilt(name="tensor_parallel_size", missing="no ranks")
    assert rule.is_asked(deployment("-tp 2"))
    assert not rule.is_asked(deployment("-tp 1"))
    assert not rule.is_asked(deployment(""))
    assert rule.message(deployment("-tp 2")) == (
        "--tensor-parallel-size 2: not available: no ranks"
    )


def test_a_rule_may_ask_more_closely() -> None:
    rule = Unbuilt(name="seed", missing="x", asks=lambda asked: asked.flags.seed == 3)
    assert rule.is_asked(deployment("--seed 3"))
    assert not rule.is_asked(deployment("--seed 4"))


def test_only_what_was_asked_in_vain_is_told() -> None:
    rule = Idle(
        names=("seed", "block_size"),
        reason="x",
        when=lambda asked: asked.flags.tensor_parallel_size == 1,
    )
    assert rule.told(deployment("--seed 3")) == ["--seed 3"]
    assert rule.told(deployment("--seed 3 --block-size 128")) == ["--seed 3"]
    assert not rule.told(deployment("--seed 3 -tp 2"))
