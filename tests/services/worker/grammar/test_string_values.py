"""Raw texts of strict string arguments."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from shared.constraint import CalledTool, Constraint
from shared.errors import RequestError
from tests.services.worker.grammar.conftest import Reader


@pytest.fixture
def takes(
    reader: Reader, make_calls: Callable[..., Constraint], call: Callable[..., str]
) -> Callable[[Any, str], bool]:
    def check(schema: Any, value: str) -> bool:
        parameters = {"properties": {"v": {"type": "string", **schema}}, "required": ["v"]}
        tool = CalledTool(name="f", parameters_json=json.dumps(parameters), is_strict=True)
        return reader.reads(make_calls(tool), call("f", v=value))

    return check


Takes = Callable[[Any, str], bool]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({}, 'anything\n"at" all', None),
        ({"pattern": "^[a-z]+$"}, "abc", "Abc"),
        ({"pattern": "b"}, "abc", "ac"),
        ({"pattern": "^a"}, "abc", "ba"),
        ({"pattern": r"\.$"}, "end.", "end"),
        ({"pattern": r"^cost\$"}, "cost$ 3", "cost 3"),
        ({"minLength": 2, "maxLength": 3}, "éé", "e"),
        ({"maxLength": 3}, "", "abcd"),
        ({"minLength": 2, "pattern": "^a+$"}, "aa", "a"),
        ({"format": "date"}, "2026-12-31", "2026-13-01"),
        ({"format": "date-time"}, "2026-12-31T23:59:59Z", "2026-12-31 23:59"),
        ({"format": "uuid"}, "01234567-89ab-cdef-0123-456789abcdef", "0123"),
        ({"format": "ipv4"}, "192.168.0.255", "192.168.0.256"),
        ({"format": "email"}, "a.b@example.com", "a@b"),
        ({"format": "hostname"}, "a-b.example", "-a"),
    ],
)
def test_a_text_follows_what_its_schema_says(
    takes: Takes, schema: Any, good: str, bad: str | None
) -> None:
    assert takes(schema, good)
    assert bad is None or not takes(schema, bad)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"format": "made-up"}, "'made-up' cannot be enforced"),
        ({"pattern": 3}, "pattern must be a text"),
        ({"pattern": "(?=a)"}, "look-ahead"),
        ({"minLength": "2"}, "minLength must be an integer"),
        ({"minLength": 3, "maxLength": 2}, "maxLength 2 is below minLength 3"),
    ],
)
def test_what_no_expression_can_say_is_refused(takes: Takes, schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        takes(schema, "a")
