import json
from typing import Any

import jiter
import msgspec
import pytest

from shared.json_limits import MAX_DEPTH, is_portable, is_portable_number, nests_within


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


def test_levels_are_counted_to_the_bound_without_recursion() -> None:
    assert nests_within(nested(MAX_DEPTH))
    assert not nests_within(nested(MAX_DEPTH + 1))
    assert not nests_within(nested(100_000))
    assert nests_within(1, 0)
    assert nests_within([1], 1)
    assert not nests_within([1, {}], 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": ["x", 1, null, true]}', True),
        ('"\\ud83d\\ude00"', True),
        ('"\\ud83d"', False),
        ('{"a": [{"b": "\\udc00"}]}', False),
        ('{"\\ud800": 1}', False),
        ("[" * 64 + "]" * 64, True),
        ("[" * 65 + "]" * 65, False),
    ],
)
def test_what_no_writer_can_carry_is_told(text: str, expected: bool) -> None:
    assert is_portable(json.loads(text)) is expected


# The largest double, and the first number that is rounded to infinity.
LARGEST = str(2**1024 - 2**971)
TOO_LARGE = str(2**1024 - 2**970)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", True),
        ("-12345678901234567890", True),
        (LARGEST, True),
        ("-" + LARGEST, True),
        (TOO_LARGE, False),
        ("-" + TOO_LARGE, False),
        ("9" * 4300, False),
        ("9" * 4301, False),
        ("1e308", True),
        ("1e309", False),
        ("1e-400", True),
        ("0." + "3" * 998, True),
        ("0." + "3" * 999, False),
        ("1" * 900 + "e-800", True),
        ("1" * 5000 + "e-4990", False),
        ("1e" + "0" * 5000 + "1", False),
    ],
)
def test_numbers_that_some_reader_cannot_hold_are_told(text: str, expected: bool) -> None:
    assert is_portable_number(text) is expected
    if expected:
        for read in (json.loads, msgspec.json.decode, lambda data: jiter.from_json(data.encode())):
            assert abs(float(read(text))) <= float(LARGEST)
