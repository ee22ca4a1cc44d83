"""The choice of ways to start the mesh: every two options that can meet do, in few meshes."""

import itertools
import json

import pytest

from tests.e2e.layouts import (
    MAX_RANKS,
    PLAIN,
    Way,
    all_ways,
    cover,
    each_once,
    options_of,
    pairs_of,
    pairwise,
)
from tests.e2e.same_tokens import NANO


@pytest.fixture(scope="module")
def chosen() -> list[Way]:
    return pairwise()


def test_every_two_options_that_can_meet_do_in_at_most_sixteen_meshes(chosen: list[Way]) -> None:
    possible = set().union(*map(pairs_of, all_ways()))
    assert set().union(*map(pairs_of, chosen)) == possible
    assert len(set(chosen)) == len(chosen) <= 16
    assert all(way.is_possible and way.num_ranks <= MAX_RANKS for way in chosen)
    assert chosen[0] == PLAIN


def test_what_must_be_there_is() -> None:
    options = set().union(*map(options_of, all_ways()))
    for name, values in {
        "tp": (1, 2, 4),
        "pp": (1, 2),
        "dp": (1, 2),
        "drafts": (0, 1, 3, 5),
        "graphs": ("recorded", "sizes", "eager"),
        "experts": ("cut", "allgather", "alltoall", "mc2"),
        "tokens": ("whole", "dsa_cp", "flashcomm1"),
    }.items():
        assert {value for other, value in options if other == name} == set(values)
    pairs = set().union(*map(pairs_of, all_ways()))
    assert frozenset({("dp", 2), ("tp", 2)}) in pairs
    assert frozenset({("are experts spread", True), ("drafts", 5)}) in pairs
    assert frozenset({("experts", "mc2"), ("has drafts", True)}) in pairs
    assert frozenset({("tokens", "dsa_cp"), ("are experts spread", True)}) in pairs
    assert frozenset({("are tokens cut", True), ("graphs", "sizes")}) in pairs


def test_a_few_of_them_have_every_option(chosen: list[Way]) -> None:
    few = each_once(chosen)
    possible = set().union(*map(options_of, all_ways()))
    assert set().union(*map(options_of, few)) == possible
    assert set(few) <= set(chosen)
    assert len(few) <= 6


def test_a_cover_has_every_part_and_nothing_that_could_go() -> None:
    ways = [Way(drafts=drafts, dp=dp) for drafts in (0, 1, 3) for dp in (1, 2)]

    def parts_of(way: Way) -> set[object]:
        return {("drafts", way.drafts), ("dp", way.dp)}

    found = cover(ways, parts_of)
    assert set().union(*map(parts_of, found)) == set().union(*map(parts_of, ways))
    for left_out in found:
        rest = set(itertools.chain.from_iterable(parts_of(w) for w in found if w != left_out))
        assert not parts_of(left_out) <= rest


def test_a_way_without_an_effect_is_none() -> None:
    assert not Way(experts="mc2").is_possible, "one rank exchanges nothing"
    assert not Way(tp=2, graphs="recorded").is_possible
    assert not Way(pp=2, graphs="sizes").is_possible
    assert not Way(tp=4, pp=2).is_possible, "eight ranks"
    assert not Way(dp=2, tokens="dsa_cp").is_possible, "one rank has whole layers"
    assert Way(dp=2, tp=2, experts="mc2", drafts=5).is_possible


def test_a_second_stage_starts_on_a_layer_without_an_indexer_of_its_own() -> None:
    config = json.loads((NANO / "config.json").read_text())
    first, _ = Way(pp=2).environment["VLLM_PP_LAYER_PARTITION"].split(",")
    assert config["indexer_types"][int(first)] == "shared"
