"""The choice of a scheduler: the same for everybody, bounded, and it moves as little as can be."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.placement import (
    FREE_SEATS,
    Newcomer,
    PlacementRules,
    SchedulerWork,
    choose_scheduler,
    prompt_key,
)
from shared.block_hashes import BlockHashes, root_hash
from shared.wire import pack_ids, unpack_ids

RULES = PlacementRules()
KEYS = st.binary(min_size=32, max_size=32)
SIZE = 4


@st.composite
def schedulers(draw: st.DrawFn) -> list[SchedulerWork | None]:
    """Two to six, some of which are to get nothing."""
    names = draw(st.lists(st.integers(0, 99), min_size=2, max_size=6, unique=True))
    return [
        None
        if draw(st.integers(0, 4)) == 0
        else SchedulerWork(
            name=f"host-{name}:1",
            num_sequences=draw(st.integers(0, 300)),
            num_tokens=draw(st.integers(0, 50_000)),
            num_seats=draw(st.sampled_from([64, 64, 256])),
            num_step_tokens=draw(st.sampled_from([0, 2048])),
        )
        for name in names
    ]


def idle(count: int) -> list[SchedulerWork]:
    return [
        SchedulerWork(name=f"unix:/s{n}", num_seats=64, num_step_tokens=2048) for n in range(count)
    ]


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in range(count)]


def chosen(key: bytes, works: list[SchedulerWork] | list[SchedulerWork | None]) -> str | None:
    number = choose_scheduler(key, Newcomer(), works, RULES)
    work = None if number is None else works[number]
    return None if work is None else work.name


@settings(deadline=None)
@given(KEYS, schedulers(), st.randoms(use_true_random=False))
def test_two_detokenizers_with_the_same_snapshots_choose_the_same(
    key: bytes, works: list[SchedulerWork | None], random: object
) -> None:
    """Also when they were told of the schedulers in another order."""
    other = list(works)
    random.shuffle(other)  # type: ignore[attr-defined]  # hypothesis gives a Random
    assert chosen(key, works) == chosen(key, other)


@settings(deadline=None)
@given(KEYS, schedulers(), st.integers(1, 8), st.integers(1, 5_000))
def test_nobody_starves_and_the_bound_holds(
    key: bytes, works: list[SchedulerWork | None], num_sequences: int, num_tokens: int
) -> None:
    newcomer = Newcomer(num_sequences=num_sequences, num_tokens=num_tokens)
    number = choose_scheduler(key, newcomer, works, RULES)
    found = [work for work in works if work is not None]
    if not found:
        assert number is None
        return
    assert number is not None
    taken = works[number]
    assert taken is not None, "one that is to get nothing"
    under = [work for work in found if is_under(work, found, newcomer)]
    assert not under or taken in under, "one above the bound, though others are not"


def is_under(work: SchedulerWork, works: list[SchedulerWork], newcomer: Newcomer) -> bool:
    """The law of the module, said once more."""
    share = work.num_seats / sum(one.num_seats for one in works)
    sequences = sum(one.num_sequences for one in works) + newcomer.num_sequences
    tokens = sum(one.num_tokens for one in works) + newcomer.num_tokens
    most_sequences = RULES.skew * share * sequences + FREE_SEATS * work.num_seats
    most_tokens = RULES.skew * share * tokens + work.num_step_tokens
    return work.num_sequences < most_sequences and work.num_tokens < most_tokens


@settings(deadline=None)
@given(KEYS, st.integers(2, 8), st.integers(0, 7))
def test_a_scheduler_that_leaves_takes_only_its_own_prompts_along(
    key: bytes, count: int, leaving: int
) -> None:
    works: list[SchedulerWork | None] = [*idle(count)]
    before = chosen(key, works)
    gone = works[leaving % count]
    works[leaving % count] = None
    assert gone is not None
    after = chosen(key, works)
    assert before in {after, gone.name}
    assert after != gone.name


@settings(deadline=None)
@given(KEYS, st.integers(1, 8))
def test_a_scheduler_that_comes_takes_prompts_from_others_and_moves_none_between_them(
    key: bytes, count: int
) -> None:
    works = idle(count + 1)
    before, after = chosen(key, works[:count]), chosen(key, works)
    assert after in {before, works[-1].name}


def test_prompts_are_spread_by_seats() -> None:
    """2,000 draws; 4 standard deviations of the share of a quarter are 0.04."""
    works = [*idle(2), replace(idle(3)[2], num_seats=128)]
    counts = Counter(chosen(key, works) for key in keys(2_000))
    shares = [counts[work.name] / 2_000 for work in works]
    assert shares == pytest.approx([0.25, 0.25, 0.5], abs=0.04)


def test_under_the_bound_equal_starts_meet_and_past_it_they_spread() -> None:
    works = idle(3)
    key = keys(1)[0]
    taken = []
    for _ in range(90):
        number = choose_scheduler(key, Newcomer(num_tokens=100), works, RULES)
        assert number is not None
        taken.append(number)
        old = works[number]
        works[number] = replace(
            old, num_sequences=old.num_sequences + 1, num_tokens=old.num_tokens + 100
        )
    first = taken[0]
    assert taken[:4] == [first] * 4, "a sixteenth of its seats costs nobody anything"
    counts = sorted(Counter(taken).values())
    # 1.25 times the mean of 30, and the seats that are free of cost.
    assert counts[-1] <= 1.25 * 30 + 64 / 16 + 1
    assert len(counts) == 3
    assert Counter(taken).most_common(1)[0][0] == first


def test_many_tokens_make_a_scheduler_the_second_choice_as_many_sequences_do() -> None:
    works = idle(2)
    key = keys(1)[0]
    first = choose_scheduler(key, Newcomer(), works, RULES)
    assert first is not None
    for change in ({"num_tokens": 100_000}, {"num_sequences": 60}):
        loaded = list(works)
        loaded[first] = replace(works[first], **change)
        assert choose_scheduler(key, Newcomer(), loaded, RULES) == 1 - first


def test_when_each_is_overloaded_in_its_way_the_lesser_evil_is_taken() -> None:
    works = [
        replace(work, num_seats=16, num_step_tokens=1, num_sequences=many, num_tokens=tokens)
        for work, many, tokens in zip(idle(2), (100, 1), (1, 3_000), strict=True)
    ]
    # 100 of a bound of 64; 3,000 of one of 1,877.
    assert choose_scheduler(keys(1)[0], Newcomer(), works, RULES) == 0


# -- the key ---------------------------------------------------------------------------------------


def key_of(ids: list[int], salt: str = "", num_blocks: int = 2) -> bytes:
    return prompt_key(salt, pack_ids(ids), "digest", SIZE, num_blocks)


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=2 * SIZE, max_size=2 * SIZE), st.data())
def test_prompts_that_begin_alike_have_one_key(start: list[int], data: st.DataObject) -> None:
    tails = st.lists(st.integers(0, 99), max_size=3 * SIZE)
    assert key_of(start + data.draw(tails)) == key_of(start + data.draw(tails))


def test_the_key_is_the_name_that_caches_have_for_the_start() -> None:
    ids = list(range(11))
    hashes = BlockHashes(root_hash("digest", SIZE, "salt"), SIZE)
    prompt = unpack_ids(pack_ids(ids), "ids")
    hashes.extend(2, prompt, prompt[:0])
    assert key_of(ids, "salt") == hashes.known[1]
    assert key_of(ids[:7], "salt") == hashes.known[0], "of the blocks that are full"


def test_other_salts_other_tokens_and_other_prompts_below_a_block_have_other_keys() -> None:
    ids = list(range(9))
    found = {key_of(ids), key_of(ids, "salt"), key_of([*ids[:7], 99, 9])}
    short = {key_of([1, 2]), key_of([1, 3]), key_of([1, 2], "salt")}
    assert len(found | short) == 6


def test_before_a_block_size_is_known_prompts_are_named_all_the_same() -> None:
    assert prompt_key("", pack_ids(range(200)), "", 0, 1) == prompt_key(
        "", pack_ids(range(190)), "", 128, 1
    )
