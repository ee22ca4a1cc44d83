import random
from collections import Counter

import numpy as np

from services.worker.token_counts import TokenCounts


def as_dict(counts: TokenCounts) -> dict[int, int]:
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_prompt_tokens_are_listed_and_not_counted() -> None:
    counts = TokenCounts(np.array([5, 6, 5], np.uint32), np.array([6, 7, 7], np.uint32))
    assert as_dict(counts) == {5: 0, 6: 1, 7: 2}


def test_counting_token_by_token_equals_counting_at_once() -> None:
    chance = random.Random(3)
    prompt = [chance.randrange(300) for _ in range(50)]
    output = [chance.randrange(1000) for _ in range(2000)]
    counts = TokenCounts(np.array(prompt, np.uint32), np.array(output[:700], np.uint32))
    for token in output[700:]:
        counts.add(token)
    assert as_dict(counts) == dict.fromkeys(prompt, 0) | Counter(output)


def test_nothing_yet_is_fine() -> None:
    counts = TokenCounts(np.empty(0, np.uint32), np.empty(0, np.uint32))
    assert as_dict(counts) == {}
    counts.add(4)
    assert as_dict(counts) == {4: 1}


def test_drafts_are_counted_as_if_they_were_output_and_leave_no_trace() -> None:
    counts = TokenCounts(np.array([5, 6], np.uint32), np.array([6, 7], np.uint32))
    before = as_dict(counts)
    after = counts.after([7, 5, 90, 91, 90])
    found = dict(zip(after.ids.tolist(), after.counts.tolist(), strict=True))
    assert found == {5: 1, 6: 1, 7: 2, 90: 2, 91: 1}
    assert as_dict(counts) == before
    assert counts.after([]).counts.tolist() == counts.counts.tolist()
