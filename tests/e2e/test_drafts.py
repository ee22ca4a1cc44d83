"""The mesh with drafts, started as the deployment guide starts it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.mesh import Mesh, running
from tests.e2e.test_chat import WORDS, ask

DRAFTS = '{"num_speculative_tokens": 3, "method": "deepseek_mtp", "enforce_eager": true}'


@pytest.fixture(scope="module")
def drafting() -> Iterator[Mesh]:
    yield from running("--speculative-config", DRAFTS, "--dtype", "float32", "--num-threads", "1")


def test_an_answer_is_the_same_and_its_drafts_are_told(drafting: Mesh) -> None:
    answer = ask(drafting)
    assert answer.choices[0].message.content == WORDS
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    assert details.rejected_prediction_tokens is not None
    assert details.accepted_prediction_tokens < answer.usage.completion_tokens


def test_drafts_are_counted_by_position(drafting: Mesh) -> None:
    ask(drafting)
    drafting.until(
        lambda: drafting.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") > 0,
        10,
        "drafts are counted",
    )
    # In this order: both may still grow between the two readings.
    accepted = drafting.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafted = drafting.metric("vllm:spec_decode_num_draft_tokens_total")
    assert 0 < accepted <= drafted


def test_many_at_once_and_stop_strings_leave_nothing_behind(drafting: Mesh) -> None:
    with ThreadPoolExecutor(8) as pool:
        plain = [pool.submit(ask, drafting) for _ in range(8)]
        stopped = [pool.submit(ask, drafting, stop="gamma") for _ in range(8)]
    assert {one.result().choices[0].message.content for one in plain} == {WORDS}
    assert {one.result().choices[0].message.content for one in stopped} == {"alpha beta "}
    for one in stopped:
        usage = one.result().usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.accepted_prediction_tokens
    drafting.until_idle()
