"""Rows for training: what counts is what the model says, nothing else."""

import random
from pathlib import Path

import pytest

from tools.nano.data import Encoder, Mix, make_batch
from tools.nano.episode import Episode, assistant, tool_result, user


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(Path(__file__).parents[3] / "models" / "glm-nano")


def _said(encoder: Encoder, episode: Episode) -> str:
    ids, weights = encoder.encode(episode)
    said = [number for number, weight in zip(ids, weights, strict=True) if weight]
    text: str = encoder.tokenizer.decode(said, skip_special_tokens=False)
    return text


def test_thoughts_count_only_where_the_model_thinks_now(encoder: Encoder) -> None:
    messages = [
        user("a"),
        assistant("b", reasoning="r1"),
        user("c"),
        assistant("d", reasoning="r2"),
    ]
    said = _said(encoder, Episode(skill="echo", messages=messages, thinking=True))
    assert said == "b<|user|>r2</think>d<|user|>"
    said = _said(encoder, Episode(skill="echo", messages=messages, thinking=False))
    assert said == "b<|user|>d<|user|>"


def test_call_ends_with_observation_and_the_result_is_not_ours(encoder: Encoder) -> None:
    call = assistant("", reasoning="r", calls=[("f", {"k": "v"})])
    markup = "<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call><|observation|>"
    said = _said(encoder, Episode(skill="tool_call", messages=[user("a"), call]))
    assert said == "r</think>" + markup
    more = [user("a"), call, tool_result("12"), assistant("ok", reasoning="s")]
    said = _said(encoder, Episode(skill="tool_result", messages=more))
    assert said == "r</think>" + markup + "s</think>ok<|user|>"


def test_rows_are_filled_with_whole_episodes(encoder: Encoder) -> None:
    mix = Mix(rows=2, length=128, skills={"echo": 0.5, "json": 0.5}, max_turns=1)
    batch = make_batch(encoder, random.Random(0), mix)
    assert batch.ids.shape == (2, 128)
    assert (batch.documents >= 0).float().mean() > 0.8
    start = encoder.tokenizer.token_to_id("[gMASK]")
    for row in range(2):
        numbers = [n for n in batch.documents[row].unique().tolist() if n >= 0]
        first = [int((batch.documents[row] == n).nonzero()[0]) for n in numbers]
        assert all(batch.ids[row, place] == start for place in first)
    assert not batch.weights[batch.documents < 0].any()
