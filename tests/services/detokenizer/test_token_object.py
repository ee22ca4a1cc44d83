import pytest

from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.driven import drive
from tests.services.detokenizer.frames import events
from tests.services.detokenizer.words import EOS, ids

TEXT = "a<think>日本"


@pytest.mark.parametrize("include_text", [True, False])
def test_all_ids_come_back_and_text_on_demand(include_text: bool) -> None:
    options = {"include_text": include_text, "skip_special_tokens": False}
    choice = drive(ObjectKind.TOKENS, TEXT, **options).body["choices"][0]
    assert choice["token_ids"] == [*ids(TEXT), EOS]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice.get("text") == (TEXT if include_text else None)


def test_a_stream_brings_the_same_ids_piece_by_piece() -> None:
    driven = drive(ObjectKind.TOKENS, TEXT, is_stream=True, groups=(2,), reason=FinishReason.LENGTH)
    stream = events(driven.data)
    pieces = [event["choices"][0] for event in stream[:-1]]
    assert [token for piece in pieces for token in piece["token_ids"]] == ids(TEXT)
    assert [piece["finish_reason"] for piece in pieces][-2:] == [None, "length"]
    assert stream[-1] == "[DONE]"


def test_logprobs_name_tokens_by_id() -> None:
    body = drive(ObjectKind.TOKENS, "ab", include_logprobs=True).body
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == [*ids("ab"), EOS]
    assert entries[0]["rank"] == 1
    assert entries[0]["logprob"] == -0.5
