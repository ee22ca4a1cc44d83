import pytest

from services.detokenizer.reading import check_token_ids, parse_members, parse_schema
from shared.errors import RequestError
from shared.wire import pack_ids


def test_no_bytes_are_no_schema() -> None:
    assert parse_schema(b"", "f") is None
    assert parse_schema(b'{"type": "object"}', "f") == {"type": "object"}


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000])
def test_a_broken_schema_is_refused_by_field(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_schema(data, "output.tools.[0].parameters_json")
    assert caught.value.field == "output.tools.[0].parameters_json"


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    check_token_ids(pack_ids([0, 9]), "p", 10)
    check_token_ids(b"", "p", 10)
    with pytest.raises(RequestError, match="id 10"):
        check_token_ids(pack_ids([0, 10]), "p", 10)


def test_members_of_an_object_come_without_its_braces() -> None:
    assert parse_members(b"", "f") == b""
    assert parse_members(b"{}", "f") == b""
    assert parse_members(b'{"a": 1, "b": "\xc3\xa9"}', "f") == b'"a":1,"b":"\xc3\xa9"'


@pytest.mark.parametrize("data", [b"[]", b"{", b"1", b'{"a": NaN}', b"\xff"])
def test_what_is_no_object_is_refused_by_field(data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_members(data, "output.echo_json")
    assert caught.value.field == "output.echo_json"
