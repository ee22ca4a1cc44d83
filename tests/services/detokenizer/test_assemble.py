import json
from typing import Any

import pytest

from services.detokenizer.build import build_presenter, build_response
from shared.endings import FinishReason
from tests.services.detokenizer.frames import CONTEXT, events, finished, submit
from tests.services.detokenizer.words import ids


def stream(texts: list[str], **options: Any) -> list[Any]:
    """Two tokens per render and choice, interleaved."""
    request = submit(len(texts), is_stream=True, **options)
    response = build_response(request, CONTEXT, 0.0)
    presenter, data = build_presenter(response, request.output, CONTEXT), b""
    pending = [ids(text) for text in texts]
    while any(choice.end is None for choice in response.choices):
        for choice, tokens in zip(response.choices, pending, strict=True):
            if tokens:
                choice.feed(tokens[:2], None)
                del tokens[:2]
            elif choice.end is None:
                choice.finish(finished(FinishReason.LENGTH, num_cached_tokens=1))
        data += presenter.render(response.choices)
    assert presenter.render(response.choices) == b""
    return events(data)


def test_every_choice_opens_before_any_text_and_ends_once() -> None:
    shown = stream(["abcd", "x"])
    openings = [event["choices"][0] for event in shown[:2]]
    assert [(c["index"], c["delta"].get("role")) for c in openings] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    ends = [
        event["choices"][0]["index"]
        for event in shown[:-1]
        if event["choices"][0]["finish_reason"] is not None
    ]
    assert sorted(ends) == [0, 1]
    assert shown.count("[DONE]") == 1


def test_choices_interleave_without_mixing() -> None:
    texts = ["abcdef", "uvw", ""]
    joined = ["", "", ""]
    for event in stream(texts)[3:-1]:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["delta"].get("content", "")
    assert joined == texts


def test_usage_comes_once_directly_before_done() -> None:
    shown = stream(["ab", "c"], include_usage=True)
    usage = shown[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["system_fingerprint"] == "glm-mesh-test"
    assert not any("usage" in event for event in shown[:-2])


def test_continuous_usage_is_in_every_chunk_from_zero() -> None:
    shown = stream(["abcd"], include_usage=True, include_continuous_usage=True)
    counts = [event["usage"]["completion_tokens"] for event in shown[:-1]]
    assert (counts[0], counts[-1]) == (0, 4)
    assert counts == sorted(counts)
    assert len(counts) == len(shown) - 1


@pytest.mark.parametrize("name", ['m"\\', "模型"])
def test_names_are_escaped(name: str) -> None:
    request = submit(model=name, response_id=name)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    assert presenter.render(response.choices) == b""
    response.choices[0].finish(finished())
    body = json.loads(presenter.render(response.choices))
    assert (body["model"], body["id"]) == (name, name)
    assert presenter.render(response.choices) == b""


def test_a_name_with_line_separators_stays_in_its_line() -> None:
    name = "a\u2028b\u2029c\x85d"
    shown = stream(["abcd"], model=name, include_usage=True)
    assert {event["model"] for event in shown[:-1]} == {name}
    request = submit(is_stream=True, model=name)
    response = build_response(request, CONTEXT, 0.0)
    presenter = build_presenter(response, request.output, CONTEXT)
    response.choices[0].finish(finished())
    data = presenter.render(response.choices).decode()
    assert not {"\u2028", "\u2029", "\x85"}.intersection(data)
