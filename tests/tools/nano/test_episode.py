"""Messages in the shape the chat template takes."""

from tools.nano.episode import assistant


def test_calls_are_listed_only_when_there_are_any() -> None:
    assert "tool_calls" not in assistant("x", reasoning="r")
    (call,) = assistant("", reasoning="r", calls=[("f", {"a": 1})])["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
