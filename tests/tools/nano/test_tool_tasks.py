"""Conversations about tools: calls are of declared tools, with arguments from the request."""

import random

from tools.nano.tool_tasks import conversation, listing
from tools.nano.words import Words


def test_listing_has_one_kind_of_separator() -> None:
    assert [listing(list("abc"[:n])) for n in range(4)] == ["", "a", "a, b", "a, b, c"]


def test_calls_name_declared_tools_and_copy_from_the_request() -> None:
    rng = random.Random(3)
    for _ in range(200):
        tools, messages = conversation(rng, Words(rng, "train"), 1, results=False)
        declared = {t["function"]["name"]: t["function"]["parameters"]["properties"] for t in tools}
        for call in messages[-1]["tool_calls"]:
            function = call["function"]
            assert set(function["arguments"]) == set(declared[function["name"]])
            assert all(str(v) in messages[0]["content"] for v in function["arguments"].values())


def test_every_call_is_answered_and_reported_when_results_are_asked_for() -> None:
    rng = random.Random(4)
    for _ in range(50):
        _, messages = conversation(rng, Words(rng, "train"), 2, results=True)
        calls = sum(len(message.get("tool_calls", [])) for message in messages)
        results = [message["content"] for message in messages if message["role"] == "tool"]
        assert len(results) == calls
        assert messages[-1]["content"].startswith("The answer is ")
        assert results[-1] in messages[-1]["content"]
