import json
from typing import Any

import pytest

from services.detokenizer.build import build_presenter, build_response
from services.detokenizer.messages import ObjectKind
from shared.endings import FinishReason
from tests.services.detokenizer.frames import CONTEXT, events, finished, logprobs, submit
from tests.services.detokenizer.words import EOS, ids


def complete(texts: list[str], *, group: int = 1, **options: Any) -> Any:
    request = submit(len(texts), object_kind=ObjectKind.TEXT_COMPLETION, **options)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    data = b""
    for choice, text in zip(response.choices, texts, strict=True):
        tokens = ids(text)
        for start in range(0, len(tokens), group):
            piece = tokens[start : start + group]
            wanted = request.output.include_logprobs
            choice.feed(piece, logprobs(len(piece), [(97, -1.0)]) if wanted else None)
            data += presenter.render(response.choices)
        choice.finish(finished(FinishReason.LENGTH))
        data += presenter.render(response.choices)
    return events(data) if request.output.is_stream else json.loads(data)


def test_a_chunk_has_the_documented_keys_and_no_role_comes_first() -> None:
    stream = complete(["ab"], is_stream=True)
    assert stream[0] == {
        "id": "r",
        "object": "text_completion",
        "created": 7,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "a",
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
    }
    assert stream[-2]["choices"][0]["finish_reason"] == "length"
    assert stream[-1] == "[DONE]"


@pytest.mark.parametrize("group", [1, 2, 50])
def test_a_stream_joins_to_the_body(group: int) -> None:
    texts = ["one <think>two", "日本 three"]
    stream = complete(texts, is_stream=True, group=group)
    joined = ["", ""]
    for event in stream[:-1]:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    body = complete(texts)
    assert [choice["text"] for choice in body["choices"]] == joined == texts


def test_an_echoed_prompt_comes_before_the_first_text() -> None:
    echo: dict[str, Any] = {"echo_texts": ("P1 ", "P2 ")}
    stream = complete(["ab", "c"], is_stream=True, **echo)
    first = [event["choices"][0]["text"] for event in stream[:-1]]
    assert first == ["P1 a", "b", "", "P2 c", ""]
    assert [c["text"] for c in complete(["ab", "c"], **echo)["choices"]] == ["P1 ab", "P2 c"]


def test_logprob_columns_count_offsets_in_the_whole_text() -> None:
    options: dict[str, Any] = {"include_logprobs": True, "num_top_logprobs": 1}
    body = complete(["é日本x"], echo_texts=("ab",), **options)
    shown = body["choices"][0]["logprobs"]
    assert shown["tokens"] == ["é", "日本", "x"]
    assert shown["text_offset"] == [2, 3, 5]
    stream = complete(["é日本x"], echo_texts=("ab",), is_stream=True, **options)
    offsets = [
        offset
        for event in stream[:-1]
        if event["choices"][0]["logprobs"]
        for offset in event["choices"][0]["logprobs"]["text_offset"]
    ]
    assert offsets == shown["text_offset"]


def test_usage_counts_every_prompt_unless_choices_share_one() -> None:
    assert complete(["a", "b"])["usage"]["prompt_tokens"] == 6
    shared = complete(["a", "b"], num_choices_per_prompt=2)
    assert shared["usage"]["prompt_tokens"] == 3
    assert "completion_tokens_details" not in shared["usage"]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    assert EOS not in ids("a")
    assert complete(["a<|user|>b"])["choices"][0]["text"] == "ab"
    kept = complete(["a<|user|>b"], skip_special_tokens=False)
    assert kept["choices"][0]["text"] == "a<|user|>b"


def measured(*, is_stream: bool = False, **options: Any) -> Any:
    """The first choice of a completion whose prompt, tokens 1 to 3, was measured."""
    request = submit(
        1,
        object_kind=ObjectKind.TEXT_COMPLETION,
        is_stream=is_stream,
        include_prompt_logprobs=True,
        **options,
    )
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    choice = response.choices[0]
    assert choice.take_prompt_logprobs(1, logprobs(2, [(98, -0.25)]))
    data = b""
    for token in ids("ab"):
        wanted = request.output.include_logprobs
        choice.feed([token], logprobs(1, [(97, -1.0)]) if wanted else None)
        data += presenter.render(response.choices)
    choice.finish(finished(FinishReason.LENGTH))
    data += presenter.render(response.choices)
    return events(data) if is_stream else json.loads(data)["choices"][0]


def test_an_echo_with_logprobs_has_those_of_the_prompt_first() -> None:
    options: Any = {"echo_texts": ("\x01\x02\x03",), "include_logprobs": True}
    shown = measured(num_top_logprobs=1, **options)["logprobs"]
    assert shown["tokens"] == ["\x01", "\x02", "\x03", "a", "b"]
    assert shown["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert shown["text_offset"] == [0, 1, 2, 3, 4]
    assert shown["top_logprobs"][:2] == [None, {"b": -0.25, "\x02": -0.5}]
    stream = measured(is_stream=True, num_top_logprobs=1, **options)
    pieces = [event["choices"][0]["logprobs"] for event in stream[:-1]]
    joined = {name: sum((p[name] for p in pieces if p), []) for name in shown}  # noqa: RUF017
    assert joined == shown


def test_a_measured_prompt_stands_in_its_choice_by_ids() -> None:
    shown = measured()["prompt_logprobs"]
    assert shown[0] is None
    assert shown[1] == {
        "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        "2": {"logprob": -0.5, "rank": 1, "decoded_token": "\x02"},
    }
    assert len(shown) == 3


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prompt_alone_shows_nothing_that_was_generated(is_stream: bool) -> None:
    options: Any = {"echo_texts": ("\x01\x02\x03",), "include_logprobs": True}
    shown = measured(is_stream=is_stream, is_prompt_only=True, **options)
    if is_stream:
        (chunk, _) = shown
        shown = chunk["choices"][0]
    assert shown["text"] == "\x01\x02\x03"
    assert shown["logprobs"]["tokens"] == ["\x01", "\x02", "\x03"]
    assert shown["finish_reason"] == "length"
