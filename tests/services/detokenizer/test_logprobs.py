import json
import math

import pytest

from services.detokenizer.assemble import encode
from services.detokenizer.choice import LogprobEntry
from services.detokenizer.logprobs import FLOOR, LogprobWriter, finite
from shared.sampling import TokenLogprobs
from tests.services.detokenizer.words import EOS, VOCABULARY, ids


def entry(
    token: int, top: dict[int, float], *, context: bytes = b"", offset: int = 0
) -> LogprobEntry:
    values = TokenLogprobs(
        logprob=-0.5, rank=1, top_token_ids=tuple(top), top_logprobs=tuple(top.values())
    )
    return LogprobEntry(token, context, offset, values)


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf, -1e30])
def test_what_json_cannot_say_is_the_floor(value: float) -> None:
    assert finite(value) == FLOOR
    shown = LogprobWriter(VOCABULARY, num_top=1).chat([entry(97, {98: value})])
    assert json.loads(encode(shown))["content"][0]["top_logprobs"][0]["logprob"] == FLOOR


def test_a_chat_entry_has_text_bytes_and_alternatives() -> None:
    shown = LogprobWriter(VOCABULARY, num_top=1).chat([entry(97, {97: -0.5, 98: -1.0})])
    assert shown == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}],
            }
        ],
        "refusal": None,
    }


def test_parts_of_characters_are_decoded_behind_what_was_emitted() -> None:
    last, context = 0x80, "😀".encode()[:3]
    shown = LogprobWriter(VOCABULARY, num_top=2).chat([entry(last, {98: -1.0}, context=context)])
    token = shown["content"][0]
    assert (token["token"], token["bytes"]) == ("😀", [0x80])
    assert token["top_logprobs"][0]["token"] == "�b"


@pytest.mark.parametrize("token", [0xF0, 0x9F, 0xFF, EOS, *ids(" the")])
def test_no_token_has_an_empty_text(token: int) -> None:
    shown = LogprobWriter(VOCABULARY, num_top=0).chat([entry(token, {})])
    assert shown["content"][0]["token"]
    assert shown["content"][0]["bytes"]


def test_a_completion_entry_is_columns_with_offsets() -> None:
    writer = LogprobWriter(VOCABULARY, num_top=2)
    shown = writer.completion(
        [entry(97, {98: -0.1, 99: -0.2}), entry(98, {0xF0: -1.0, 0xF1: -2.0}, offset=1)], shift=4
    )
    assert shown == {
        "text_offset": [4, 5],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"b": -0.1, "c": -0.2, "a": -0.5}, {"�": -1.0, "b": -0.5}],
    }


def test_without_alternatives_a_completion_shows_none() -> None:
    shown = LogprobWriter(VOCABULARY, num_top=0).completion([entry(97, {})])
    assert shown["top_logprobs"] == [None]
