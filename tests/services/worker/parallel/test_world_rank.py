"""Whole replicas in processes: the tokens of one rank alone, and what happens when one is lost."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.model_build import build_model_executor
from services.worker.parallel.topology import Topology
from tests.services.worker.parallel.drill_cases import LIMIT_S
from tests.services.worker.parallel.executor_cases import make_settings, run_jobs
from tests.services.worker.parallel.ranks import Ranks

_WORDS = random.Random(1)


def make_job(num_prompt: int, **sampling: Any) -> dict[str, Any]:
    prompt = [_WORDS.randrange(97) for _ in range(num_prompt)]
    return {"prompt": prompt, "max_tokens": 9, "ignore_eos": True} | sampling


# Prompts beyond the 16 positions that are selected; unequal work for two replicas.
JOBS = [
    [
        make_job(30, num_logprobs=2),
        make_job(7, repetition_penalty=1.4),
        make_job(45, temperature=0.9, seed=7),
    ],
    [make_job(12), make_job(3, temperature=1.2, seed=3, num_logprobs=0)],
]


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Any]) -> Path:
    """Layers 1 and 3 share the selection of the layer before."""
    path: Path = make_checkpoint(num_nextn_predict_layers=1).path
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Callable[..., Any]:
    """What one rank alone makes of the jobs."""
    known: dict[tuple[int, int], Any] = {}

    def run(replica: int, num_drafts: int) -> Any:
        key = replica, num_drafts
        if key not in known:
            settings = make_settings(
                str(checkpoint), enforce_eager=True, num_speculative_tokens=num_drafts
            )
            known[key] = run_jobs(build_model_executor(settings, checkpoint), JOBS[replica])
        return known[key]

    return run


# Each kind of layout, each method, and drafts, with one another at least once.
LAYOUTS = [
    ("tp2", "auto", 3),
    ("tp4", "auto", 0),
    ("tp2,ep", "mc2", 3),
    ("dp2,ep", "allgather", 3),
    ("dp2,ep", "alltoall", 0),
    ("pp2[3/1]", "auto", 3),
    ("tp2,pp2[1/3]", "auto", 0),
    ("dp2,tp2,ep", "mc2", 3),
    ("dp2,pp2[3/1],ep", "alltoall", 3),
]


DSA_CP, FLASHCOMM = {"enable_dsa_cp": True}, {"enable_flashcomm1": True}
# Ranks that cut tokens: prompts in chunks beside decodes, drafts, and steps with fewer than ranks.
CUT_LAYOUTS = [
    ("tp2", "auto", 3, DSA_CP),
    ("tp4", "auto", 1, DSA_CP | FLASHCOMM),
    ("tp2,ep", "mc2", 3, FLASHCOMM),
    ("tp4,ep", "alltoall", 0, DSA_CP | FLASHCOMM),
    ("dp2,tp2,ep", "allgather", 3, DSA_CP | FLASHCOMM),
    ("tp2,pp2[1/3]", "auto", 2, DSA_CP | FLASHCOMM),
]


@pytest.mark.parametrize(
    ("layout", "method", "num_drafts", "flags"),
    [*((*each, {}) for each in LAYOUTS), *CUT_LAYOUTS],
)
def test_ranks_together_say_what_one_says_alone(
    ranks: Ranks,
    checkpoint: Path,
    alone: Callable[..., Any],
    layout: str,
    method: str,
    num_drafts: int,
    flags: dict[str, Any],
) -> None:
    topology = Topology.parse(layout)
    found = ranks.run(
        topology.world_size,
        "executor_cases:run_ranks",
        path=str(checkpoint),
        topology=layout,
        jobs=JOBS,
        moe_comm_method=method,
        num_speculative_tokens=num_drafts,
        **flags,
    )
    for rank, results in enumerate(found):
        place = topology.coordinates(rank)
        is_leader = place.pp_rank == place.tp_rank == 0
        assert (results is not None) == is_leader
        if results is None:
            continue
        *sequences, logprobs = results
        *expected, expected_logprobs = alone(place.dp_rank, num_drafts)
        assert sequences == expected
        assert len(logprobs) == len(expected_logprobs) > 0
        for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
            assert (ours.top_token_ids == theirs.top_token_ids).all()
            assert (ours.sampled_ranks == theirs.sampled_ranks).all()
            # Sums of 64 to 96 products in another order: a few roundings of float32 in each layer.
            assert abs(ours.sampled_logprobs - theirs.sampled_logprobs).max() < 1e-5
            assert (ours.num_top_logprobs == theirs.num_top_logprobs).all()


@pytest.mark.parametrize(
    ("layout", "num_drafts", "flags"),
    [("tp2", 3, DSA_CP), ("tp2", 0, FLASHCOMM), ("tp4", 1, DSA_CP | FLASHCOMM)],
)
def test_decode_steps_of_cut_tokens_are_done_from_recordings(
    ranks: Ranks,
    checkpoint: Path,
    alone: Callable[..., Any],
    layout: str,
    num_drafts: int,
    flags: dict[str, Any],
) -> None:
    found = ranks.run(
        Topology.parse(layout).world_size,
        "executor_cases:run_recorded",
        path=str(checkpoint),
        topology=layout,
        jobs=JOBS[0],
        num_speculative_tokens=num_drafts,
        **flags,
    )
    (results, num_runs), *others = found
    assert results[:-1] == alone(0, num_drafts)[:-1]
    # Each size once when it is captured, and more than that.
    assert num_runs > 8
    assert [count for _, count in others] == [num_runs] * len(others)


@pytest.mark.parametrize(
    ("layout", "num_drafts"), [("dp2,ep", 0), ("dp2,ep", 3), ("dp2,tp2,ep", 3)]
)
def test_replicas_take_captured_steps_together(
    ranks: Ranks, checkpoint: Path, alone: Callable[..., Any], layout: str, num_drafts: int
) -> None:
    topology = Topology.parse(layout)
    found = ranks.run(
        topology.world_size,
        "executor_cases:run_ranks",
        path=str(checkpoint),
        topology=layout,
        jobs=JOBS,
        captured_from=8,
        moe_comm_method="allgather",
        num_speculative_tokens=num_drafts,
    )
    leaders = [rank for rank, results in enumerate(found) if results is not None]
    assert [topology.coordinates(rank).dp_rank for rank in leaders] == [0, 1]
    for replica, rank in enumerate(leaders):
        assert found[rank][:-1] == alone(replica, num_drafts)[:-1]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_replica_whose_plan_is_refused_keeps_step_with_the_others(
    ranks: Ranks, checkpoint: Path, alone: Callable[..., Any], num_drafts: int
) -> None:
    good, bad = ranks.run(
        2,
        "executor_cases:run_ranks",
        path=str(checkpoint),
        topology="dp2,ep",
        jobs=JOBS,
        bad_replica=1,
        moe_comm_method="alltoall",
        num_speculative_tokens=num_drafts,
    )
    assert bad == ["row 3 was never described"]
    assert good[:-1] == alone(0, num_drafts)[:-1]


@pytest.fixture
def own_ranks(tmp_path: Path) -> Iterator[Ranks]:
    """Processes that are not needed any more."""
    made = Ranks(tmp_path)
    yield made
    made.stop()


DRILLS = [
    # What happens to whom; what the verdict says of it; how long that may take.
    ("exchange", 1, f"no progress for over {LIMIT_S:g} s: rank 1 is in step 4", LIMIT_S + 2),
    ("freeze", 1, f"no progress for over {LIMIT_S:g} s: rank 1 has been silent", LIMIT_S + 2),
    ("kill", 1, "rank 1: its process ended; rank 0 is in step 4", 2),
    ("kill", 0, "rank 0: its process ended; rank 1 is in step 4", 2),
    ("exception", 1, "rank 1 failed in step 4", 2),
]


@pytest.mark.parametrize(("accident", "victim", "said", "limit_s"), DRILLS)
def test_a_lost_rank_is_named_to_all_in_time(
    own_ranks: Ranks, checkpoint: Path, accident: str, victim: int, said: str, limit_s: float
) -> None:
    found = own_ranks.run(
        2,
        "drill_cases:run_drill",
        path=str(checkpoint),
        topology="tp2",
        accident=accident,
        victim=victim,
        lost=[victim] if accident in {"kill", "freeze"} else [],
    )
    for result in found:
        if result is not None:
            assert said in result["verdict"]
            # Slack for a machine that is busy with other things; a rank waits for 30 s.
            assert result["seconds"] < limit_s + 10


def test_the_leaders_own_failure_is_the_answer_to_its_plan(
    own_ranks: Ranks, checkpoint: Path
) -> None:
    leader, follower = own_ranks.run(
        2,
        "drill_cases:run_drill",
        path=str(checkpoint),
        topology="tp2",
        accident="exception",
        victim=0,
    )
    assert "rank 0 failed in step 4" in leader["failure"]
    assert "ValueError: the fan stopped" in leader["verdict"]
    assert follower["verdict"] == leader["verdict"]


def test_ranks_started_for_different_things_are_told_apart(
    own_ranks: Ranks, checkpoint: Path
) -> None:
    found = own_ranks.run(
        2,
        "drill_cases:start_differently",
        path=str(checkpoint),
        topology="tp2",
        flags=[{"max_num_seqs": 8}, {"max_num_seqs": 4}],
    )
    for text in found:
        assert "ConfigError: max_num_seqs is 8 on rank 0 and something else on rank 1" in text


def test_a_rank_that_cannot_start_takes_the_others_with_it(
    own_ranks: Ranks, checkpoint: Path
) -> None:
    bad, good = own_ranks.run(
        2,
        "drill_cases:start_differently",
        path=str(checkpoint),
        topology="tp2",
        flags=[{"num_kv_blocks": 2}, {}],
    )
    assert bad.startswith("ConfigError: --num-kv-blocks 2")
    assert good.startswith("WorldLostError: rank 0 failed at its start: --num-kv-blocks 2")
