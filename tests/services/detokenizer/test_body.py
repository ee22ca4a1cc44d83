import pytest

from services.detokenizer.body import read_json_call


def test_name_and_arguments_are_read_and_written_as_strict_json() -> None:
    assert read_json_call('{"name":"f","arguments":{"b":1,"a":"é"}}') == (
        "f",
        '{"b": 1, "a": "é"}',
    )
    assert read_json_call('{"name": "f"}') == ("f", "{}")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "3",
        '"f"',
        "{",
        '{"name": 1}',
        '{"function": 1}',
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
)
def test_anything_else_is_no_call(text: str) -> None:
    assert read_json_call(text) is None
