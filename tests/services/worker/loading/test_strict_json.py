import pytest

from services.worker.loading.strict_json import parse_object


def test_an_object_is_parsed() -> None:
    assert parse_object('{"a": {"é": [1, 2]}}'.encode()) == {"a": {"é": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[1]", "is no JSON object"),
        (b'{"a": "\xff"}', "can't decode"),
        (b'{"a": 1, "b": 2, "a": 3}', "names 'a' twice"),
        (b'{"x": {"a": 1, "a": 1}}', "names 'a' twice"),
        (b'{"a": ' + b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_what_is_wrong_is_one_kind_of_error(text: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_object(text)
