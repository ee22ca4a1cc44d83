from services.launcher.options.conflicts.table import CONFLICTS
from services.launcher.options.deployment import Deployment
from services.launcher.options.judge import judge
from tests.services.launcher.options.cases import DECODE, extra, graphs, join, transfer, verdict


def test_asking_for_nothing_is_served_without_a_word() -> None:
    found = judge(Deployment())
    assert not found.refusals
    assert not found.lines


def test_a_conflict_is_told_although_neither_feature_is_built_and_comes_first() -> None:
    refusals = verdict("-tp 8 -dcp 4 --nnodes 2").refusals
    assert len(refusals) == 3
    assert "--decode-context-parallel-size 4 with --tensor-parallel-size 8" in refusals[0]
    assert all("not available" in refusal for refusal in refusals[1:])


def test_what_is_switched_off_is_not_refused_for_being_unbuilt() -> None:
    found = verdict(join("--enforce-eager", graphs(sizes=[4])))
    assert not found.refusals
    assert found.lines == (
        "--compilation-config cudagraph_mode=FULL_DECODE_ONLY: switched off because of "
        "--enforce-eager: steps are not captured",
        "--compilation-config cudagraph_capture_sizes=[4]: no effect: no step is captured",
    )


def test_sizes_are_judged_where_no_mode_is_given_too() -> None:
    # Steps are captured unless told otherwise.
    text = """--max-num-seqs 4 --compilation-config '{"cudagraph_capture_sizes":[2,500]}'"""
    assert any("are never used" in line for line in verdict(text).lines)
    text = """--compilation-config '{"cudagraph_capture_sizes":[512]}'"""
    assert any("no step would be captured" in line for line in verdict(text).refusals)
    text = join("--max-num-batched-tokens 64", graphs(sizes=[128, 192]))
    assert any("no step would be captured" in line for line in verdict(text).refusals)
    text = join("--max-num-batched-tokens 128", graphs(sizes=[128, 192]))
    assert not verdict(text).refusals


def test_stages_capture_nothing_and_say_so() -> None:
    found = verdict(join("-pp 2", graphs(sizes=[2])))
    assert not found.refusals
    assert any("cudagraph_capture_sizes=[2]: no effect" in line for line in found.lines)
    assert any("steps of pipeline stages are not captured" in line for line in found.lines)


def test_options_without_effect_share_a_line_with_their_reason() -> None:
    found = verdict("--data-parallel-address a --data-parallel-rpc-port 29550")
    assert found.lines == (
        "--data-parallel-address a, --data-parallel-rpc-port 29550: no effect: "
        "there is one replica",
    )


def test_one_option_switched_off_by_several_is_told_once() -> None:
    asked = join("-tp 8 -dcp 8", extra(enable_mlapo=True, enable_dsa_cp=True), transfer(DECODE))
    lines = [
        line for line in verdict(asked).lines if line.startswith("--additional-config enable_mlapo")
    ]
    assert len(lines) == 1


def test_every_rule_says_where_it_comes_from_and_has_its_own_name() -> None:
    assert all(rule.source and rule.text and len(rule.names) >= 2 for rule in CONFLICTS)
    assert len({rule.key for rule in CONFLICTS}) == len(CONFLICTS)
